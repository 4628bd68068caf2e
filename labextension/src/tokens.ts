import { Token } from '@lumino/coreutils';
import type { IDisposable } from '@lumino/disposable';
import type { ISignal } from '@lumino/signaling';

import type { Link } from './feed.js';
import type { IPoint, IRates } from './history.js';
import type { Action, IEngine, IVitals } from './vitals.js';

/** The engines of this user's machine, live; one connection for all that show them. */
export interface IPowerClient {
  /** Emitted with each sample and each change of `link`. */
  readonly changed: ISignal<IPowerClient, void>;
  readonly link: Link;
  /** The last sample; it stays while disconnected, so that what was seen can still be read. Null before the first and without a host. */
  readonly vitals: IVitals | null;
  /** Models whose engines went with their host within the last minute, where that was not about to end by itself. */
  readonly lost: string[];
  /** What the server could not do, in its words; cleared by the next sample. */
  readonly error: { message: string; remedy: string } | null;
  /** Seconds that `points` reach back. */
  readonly seconds: number;
  rates(engine: IEngine): IRates | null;
  points(engine: IEngine): IPoint[];
  /** Say that something on the page shows vitals, `most` times a second or less. Nothing is asked for while nothing does. */
  watch(most?: number): IDisposable;
  /** Resolves when it is done; rejects with RequestFailed. */
  request(action: Action, engine: IEngine): Promise<void>;
  /** Connect now. */
  retry(): void;
}

export const IPowerClient = new Token<IPowerClient>('power-lab:IPowerClient', 'Live state of the Power Lab engines.');
