/**
 * One websocket kept alive: reconnects with growing pauses, notices silence, pauses when asked. Pure: socket and timers are given.
 */
import { parse, type Action, type Message } from './vitals.js';

/**
 * `trouble`: the server says what keeps it from the engines. `unavailable`: no connection has ever come about, which is how a missing server
 * extension looks.
 */
export type Link = 'connecting' | 'live' | 'nohost' | 'trouble' | 'paused' | 'disconnected' | 'unavailable';

export interface ISocket {
  send(text: string): void;
  close(): void;
  onopen: ((event: any) => void) | null;
  onmessage: ((event: any) => void) | null;
  onclose: ((event: any) => void) | null;
}

export interface ITimers {
  now(): number;
  after(ms: number, call: () => void): unknown;
  cancel(handle: unknown): void;
}

/** Disconnected is said within 2 s of the last word. The server says something at least once a second, also where it has no host. */
const SILENCE_MS = 1750;
const CHECK_MS = 200;
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;
const HOPELESS = 3;

export class RequestFailed extends Error {
  constructor(
    message: string,
    readonly remedy: string
  ) {
    super(message);
  }
}

export class Feed {
  constructor(
    private readonly connect: () => ISocket,
    private readonly timers: ITimers,
    private readonly heard: (message: Message) => void,
    private readonly changed: (link: Link) => void
  ) {}

  get link(): Link {
    return this._link;
  }

  /** Samples a second; 0 pauses. The first positive rate opens the connection. */
  setRate(hz: number): void {
    if (hz === this._hz || this._closed) {
      return;
    }
    const was = this._hz;
    this._hz = hz;
    this._heardAt = this.timers.now();
    if (!this._socket && hz > 0 && this._retry === null) {
      this._open();
      return;
    }
    this._send({ kind: 'rate', hz });
    if (hz === 0 && ['live', 'nohost', 'trouble'].includes(this._link)) {
      this._set('paused');
    } else if (was === 0 && this._link === 'paused') {
      this._set('connecting');
    }
  }

  /** Ask something of one engine. Rejects with RequestFailed when it is refused or the connection ends first. */
  request(kind: Action, engine: string): Promise<void> {
    if (!this._ready) {
      return Promise.reject(new RequestFailed('', ''));
    }
    const id = ++this._id;
    return new Promise((resolve, reject) => {
      this._asked.set(id, { resolve, reject });
      this._send({ kind, id, engine });
    });
  }

  /** Connect now instead of at the end of the pause. */
  retry(): void {
    if (this._retry !== null) {
      this.timers.cancel(this._retry);
      this._retry = null;
      this._open();
    }
  }

  close(): void {
    this._closed = true;
    this.timers.cancel(this._retry);
    this.timers.cancel(this._check);
    this._drop();
  }

  private _open(): void {
    const socket = this.connect();
    this._socket = socket;
    this._heardAt = this.timers.now();
    socket.onopen = () => {
      this._ready = true;
      this._heardAt = this.timers.now();
      this._send({ kind: 'rate', hz: this._hz });
    };
    socket.onmessage = event => this._receive(event.data);
    socket.onclose = () => {
      if (this._socket === socket) {
        this._lost();
      }
    };
    this._watch();
  }

  private _receive(data: unknown): void {
    this._heardAt = this.timers.now();
    const message = parse(data);
    if (!message) {
      return;
    }
    this._failures = 0;
    this._known = true;
    if (message.kind === 'done' || message.kind === 'failed') {
      const asked = this._asked.get(message.id);
      this._asked.delete(message.id);
      if (message.kind === 'done') {
        asked?.resolve();
      } else {
        asked?.reject(new RequestFailed(message.message, message.remedy));
      }
      return;
    }
    this.heard(message);
    if (this._hz > 0) {
      this._set(({ vitals: 'live', nohost: 'nohost', error: 'trouble' } as const)[message.kind]);
    }
  }

  /** A socket may stay open while nobody is at its other end: what counts is that words arrive. */
  private _watch(): void {
    this.timers.cancel(this._check);
    this._check = this.timers.after(CHECK_MS, () => {
      if (!this._socket || this._closed) {
        return;
      }
      if (this._hz > 0 && this.timers.now() - this._heardAt > SILENCE_MS) {
        this._lost();
      } else {
        this._watch();
      }
    });
  }

  private _lost(): void {
    this._drop();
    if (this._closed) {
      return;
    }
    this._failures += 1;
    this._set(!this._known && this._failures >= HOPELESS ? 'unavailable' : 'disconnected');
    const pause = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** (this._failures - 1));
    this._retry = this.timers.after(pause, () => {
      this._retry = null;
      this._open();
    });
  }

  private _drop(): void {
    const socket = this._socket;
    this._socket = null;
    this._ready = false;
    if (socket) {
      socket.onopen = socket.onmessage = socket.onclose = null;
      socket.close();
    }
    const asked = [...this._asked.values()];
    this._asked.clear();
    asked.forEach(one => one.reject(new RequestFailed('', '')));
  }

  private _send(message: object): void {
    if (this._ready) {
      this._socket?.send(JSON.stringify(message));
    }
  }

  private _set(link: Link): void {
    if (link !== this._link) {
      this._link = link;
      this.changed(link);
    }
  }

  private _link: Link = 'connecting';
  private _socket: ISocket | null = null;
  private _ready = false;
  private _known = false;
  private _closed = false;
  private _hz = 0;
  private _heardAt = 0;
  private _failures = 0;
  private _id = 0;
  private _retry: unknown = null;
  private _check: unknown = null;
  private readonly _asked = new Map<number, { resolve: () => void; reject: (why: Error) => void }>();
}
