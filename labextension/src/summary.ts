/** The one line of the status bar. Pure. */
import type { Link } from './feed.js';
import { rate } from './format.js';
import type { IEngine } from './vitals.js';

export type Mood = 'idle' | 'running' | 'loading' | 'none' | 'waiting' | 'broken';

export interface ISummary {
  mood: Mood;
  /** The engine to name: the one that works, or else the first. */
  model: string;
  /** How many more engines there are. */
  others: number;
  tokensPerS: number;
  speed: string;
}

/** @param lost whether engines have just gone with their host. */
export function summary(link: Link, engines: IEngine[], speedOf: (engine: IEngine) => number, lost = false): ISummary {
  const shown = engines.find(engine => engine.running > 0) ?? engines.find(engine => engine.state === 'loading') ?? engines[0];
  const tokensPerS = engines.reduce((sum, engine) => sum + speedOf(engine), 0);
  return {
    mood: lost ? 'broken' : mood(link, engines, shown),
    model: shown?.model ?? '',
    others: Math.max(0, engines.length - 1),
    tokensPerS,
    speed: rate(tokensPerS)
  };
}

function mood(link: Link, engines: IEngine[], shown: IEngine | undefined): Mood {
  if (link === 'disconnected' || link === 'unavailable' || link === 'trouble') {
    return 'broken';
  }
  if (!shown) {
    return link === 'connecting' ? 'waiting' : 'none';
  }
  if (engines.some(engine => engine.running > 0)) {
    return 'running';
  }
  return shown.state === 'loading' ? 'loading' : 'idle';
}
