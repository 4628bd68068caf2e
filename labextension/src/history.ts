/** The last minutes of each engine: rates from its counters, and series for sparklines. Bounded; pure. */
import type { IEngine, IVitals } from './vitals.js';

export interface IPoint {
  /** Unix seconds. */
  at: number;
  value: number;
}

/** Rates over the last two seconds; where nothing happened in them, shares over the engine's whole life, with `recent` false. */
export interface IRates {
  tokensPerS: number;
  promptTokensPerS: number;
  acceptance: IShare;
  tokensPerPass: IShare;
  hitRate: IShare;
  graphHits: IShare;
}

export interface IShare {
  value: number | null;
  recent: boolean;
}

interface ITrack {
  recent: Array<{ at: number; engine: IEngine }>;
  points: IPoint[];
}

const WINDOW_S = 2;
const MOST_POINTS = 240;

export class History {
  constructor(public seconds = 120) {}

  /** Take in a sample. Engines that are gone are forgotten. */
  add(vitals: IVitals): void {
    const keys = new Set(vitals.engines.map(engine => engine.engine));
    for (const key of this._tracks.keys()) {
      if (!keys.has(key)) {
        this._tracks.delete(key);
      }
    }
    for (const engine of vitals.engines) {
      this._add(vitals.at, engine);
    }
  }

  rates(key: string): IRates | null {
    const track = this._tracks.get(key);
    const last = track?.recent[track.recent.length - 1];
    return track && last ? ratesBetween(track.recent[0]!, last) : null;
  }

  /** Tokens a second, oldest first. */
  points(key: string): IPoint[] {
    return this._tracks.get(key)?.points ?? [];
  }

  clear(): void {
    this._tracks.clear();
  }

  private _add(at: number, engine: IEngine): void {
    let track = this._tracks.get(engine.engine);
    const last = track?.recent[track.recent.length - 1];
    if (!track || (last && (engine.steps < last.engine.steps || at < last.at))) {
      track = { recent: [], points: [] }; // loaded anew under the same key, or the clock was set back
      this._tracks.set(engine.engine, track);
    }
    track.recent.push({ at, engine });
    while (track.recent.length > 2 && track.recent[1]!.at <= at - WINDOW_S) {
      track.recent.shift();
    }
    const before = track.points[track.points.length - 1];
    const spacing = this.seconds / MOST_POINTS;
    if (!before || at - before.at >= spacing) {
      track.points.push({ at, value: ratesBetween(track.recent[0]!, { at, engine }).tokensPerS });
    }
    while (track.points.length > 0 && track.points[0]!.at < at - this.seconds) {
      track.points.shift();
    }
  }

  private readonly _tracks = new Map<string, ITrack>();
}

type Sample = { at: number; engine: IEngine };

function ratesBetween(from: Sample, to: Sample): IRates {
  const [a, b] = [from.engine, to.engine];
  const time = to.at - from.at;
  const perS = (now: number, then: number, given: number) => (time > 0 ? Math.max(0, now - then) / time : given);
  const graphs = (engine: IEngine) => engine.replays + engine.captures + engine.eager;
  return {
    tokensPerS: perS(b.tokens, a.tokens, b.tokens_per_s),
    promptTokensPerS: perS(b.prompt_tokens, a.prompt_tokens, b.prompt_tokens_per_s),
    acceptance: share(b.accepted - a.accepted, b.drafted - a.drafted, b.accepted, b.drafted),
    tokensPerPass: share(b.tokens - a.tokens, b.passes - a.passes, b.tokens, b.passes),
    hitRate: share(b.cached_tokens - a.cached_tokens, b.prompt_tokens - a.prompt_tokens, b.cached_tokens, b.prompt_tokens),
    graphHits: share(b.replays - a.replays, graphs(b) - graphs(a), b.replays, graphs(b))
  };
}

function share(part: number, whole: number, lifePart: number, lifeWhole: number): IShare {
  if (whole > 0) {
    return { value: part / whole, recent: true };
  }
  return { value: lifeWhole > 0 ? lifePart / lifeWhole : null, recent: false };
}
