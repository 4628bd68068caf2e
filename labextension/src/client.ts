import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { URLExt } from '@jupyterlab/coreutils';
import { ServerConnection } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { DisposableDelegate, type IDisposable } from '@lumino/disposable';
import { type ISignal, Signal } from '@lumino/signaling';

import { Feed, type Link } from './feed.js';
import { History, type IPoint, type IRates } from './history.js';
import { follow } from './settings.js';
import { IPowerClient } from './tokens.js';
import type { Action, IEngine, IVitals, Message } from './vitals.js';

const ADDRESS = 'power-lab/api/live';
const MOURNED_MS = 60_000; // a host that went away is news so long
const ENDING_S = 3; // one that said it would end so soon is none
const ACTIVITY = ['pointermove', 'pointerdown', 'keydown', 'wheel', 'focus'] as const;

class Client implements IPowerClient {
  constructor(settings: ServerConnection.ISettings) {
    const timers = {
      now: () => performance.now(),
      after: (ms: number, call: () => void) => window.setTimeout(call, ms),
      cancel: (handle: unknown) => window.clearTimeout((handle ?? undefined) as number | undefined)
    };
    this._feed = new Feed(
      () => new settings.WebSocket(address(settings)),
      timers,
      message => this._hear(message),
      () => this._changed.emit()
    );
    document.addEventListener('visibilitychange', () => this._tune());
    window.addEventListener('online', () => this._feed.retry());
    for (const kind of ACTIVITY) {
      window.addEventListener(kind, () => this._active(), { capture: true, passive: true });
    }
  }

  get changed(): ISignal<IPowerClient, void> {
    return this._changed;
  }

  get link(): Link {
    return this._feed.link;
  }

  get vitals(): IVitals | null {
    return this._vitals;
  }

  get error() {
    return this._error;
  }

  get lost(): string[] {
    return this._lost;
  }

  get seconds(): number {
    return this._history.seconds;
  }

  rates(engine: IEngine): IRates | null {
    return this._history.rates(engine.engine);
  }

  points(engine: IEngine): IPoint[] {
    return this._history.points(engine.engine);
  }

  watch(most = Infinity): IDisposable {
    const watcher = { most };
    this._watchers.add(watcher);
    this._tune();
    return new DisposableDelegate(() => {
      this._watchers.delete(watcher);
      this._tune();
    });
  }

  request(action: Action, engine: IEngine): Promise<void> {
    return this._feed.request(action, engine.engine);
  }

  retry(): void {
    this._feed.retry();
  }

  /** @param hz samples a second. @param seconds of history. @param idle minutes without a hand on this page until it pauses; 0: never. */
  configure(hz: number, seconds: number, idle: number): void {
    this._hz = hz;
    this._history.seconds = seconds;
    this._idle = idle;
    this._active();
    this._tune();
  }

  private _hear(message: Message): void {
    if (message.kind === 'vitals') {
      this._vitals = message;
      this._lost = [];
      this._error = null;
      this._history.add(message);
    } else if (message.kind === 'nohost') {
      this._mourn();
      this._vitals = null;
      this._error = null;
      this._history.clear();
    } else if (message.kind === 'error') {
      this._error = message;
    }
    this._changed.emit();
  }

  private _mourn(): void {
    const before = this._vitals;
    if (before && (before.ends_in_s === null || before.ends_in_s > ENDING_S)) {
      this._lost = before.engines.map(engine => engine.model);
      this._lostAt = performance.now();
    } else if (performance.now() - this._lostAt > MOURNED_MS) {
      this._lost = [];
    }
  }

  /** The only place that decides how often the server is asked. */
  private _tune(): void {
    const seen = document.visibilityState === 'visible' && !this._resting;
    const wanted = [...this._watchers].map(watcher => Math.min(watcher.most, this._hz));
    this._feed.setRate(seen ? Math.max(0, ...wanted) : 0);
  }

  private _active(): void {
    const now = Date.now();
    if (this._resting) {
      this._resting = false;
      this._tune();
    } else if (now - this._movedAt < 1000) {
      return; // a moving pointer fires a hundred times a second
    }
    this._movedAt = now;
    window.clearTimeout(this._rest);
    if (this._idle > 0) {
      this._rest = window.setTimeout(() => {
        this._resting = true;
        this._tune();
      }, this._idle * 60_000);
    }
  }

  private readonly _feed: Feed;
  private readonly _history = new History();
  private readonly _changed: Signal<IPowerClient, void> = new Signal(this);
  private _vitals: IVitals | null = null;
  private _lost: string[] = [];
  private _lostAt = 0;
  private _error: { message: string; remedy: string } | null = null;
  private readonly _watchers = new Set<{ most: number }>();
  private _hz = 4;
  private _idle = 0;
  private _resting = false;
  private _movedAt = 0;
  private _rest: number | undefined;
}

/** As JupyterLab's own kernel sockets: below the base URL, with the token where the page was given one. */
function address(settings: ServerConnection.ISettings): string {
  const url = URLExt.join(settings.wsUrl, ADDRESS);
  return settings.appendToken && settings.token ? `${url}?token=${encodeURIComponent(settings.token)}` : url;
}

export const clientPlugin: JupyterFrontEndPlugin<IPowerClient> = {
  id: 'power-lab:client',
  description: 'One connection to the Power Lab engines for all that show them.',
  autoStart: true,
  provides: IPowerClient,
  optional: [ISettingRegistry, ITranslator],
  activate: (app: JupyterFrontEnd, registry: ISettingRegistry | null, translator: ITranslator | null): IPowerClient => {
    const client = new Client(app.serviceManager.serverSettings);
    const read = (settings: ISettingRegistry.ISettings): void => {
      const value = settings.composite as { rate: number; history: number; pauseAfter: number };
      client.configure(value.rate, value.history, value.pauseAfter);
    };
    if (registry) {
      void follow(registry, clientPlugin.id, (translator ?? nullTranslator).load('power_lab'), read);
    }
    return client;
  }
};
