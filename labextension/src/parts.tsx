import * as React from 'react';

import type { IPoint, IShare } from './history.js';
import { line } from './sparkline.js';

/** One figure with its name under it. A share of the engine's whole life is drawn paler than one of the last seconds. */
export function Stat(props: { name: string; value: string; title?: string; faded?: boolean }): JSX.Element {
  return (
    <div className={`jp-PowerLab-stat${props.faded ? ' jp-mod-faded' : ''}`} title={props.title}>
      <dt>{props.name}</dt>
      <dd>{props.value}</dd>
    </div>
  );
}

export function ShareStat(props: {
  name: string;
  share: IShare | undefined;
  format: (value: number | null | undefined) => string;
  meaning: string;
  since: { recent: string; ever: string };
}): JSX.Element {
  const { share, meaning, since } = props;
  const value = share?.value ?? null;
  const when = value === null ? '' : share?.recent ? since.recent : since.ever;
  return (
    <Stat
      name={props.name}
      value={props.format(value)}
      faded={value !== null && !share?.recent}
      title={when ? `${meaning} ${when}` : meaning}
    />
  );
}

export interface IPart {
  /** The class that colours it: `jp-mod-<kind>`. */
  kind: string;
  name: string;
  size: number;
  text: string;
  title?: string;
}

/** Parts of a whole as one bar, and the legend that is needed to read it without colours. */
export function Bar(props: { name: string; value: string; parts: IPart[]; whole?: number }): JSX.Element {
  const shown = props.parts.filter(part => part.size > 0);
  const whole = props.whole ?? shown.reduce((sum, part) => sum + part.size, 0);
  const words = shown.map(part => `${part.name} ${part.text}`).join(', ');
  return (
    <div className="jp-PowerLab-measure">
      <div className="jp-PowerLab-measureHead">
        <span>{props.name}</span>
        <span className="jp-PowerLab-number">{props.value}</span>
      </div>
      <div className="jp-PowerLab-bar" role="img" aria-label={`${props.name}: ${words || props.value}`}>
        {shown.map(part => (
          <span
            key={part.kind}
            className={`jp-PowerLab-barPart jp-mod-${part.kind}`}
            style={{ width: `${whole > 0 ? (100 * part.size) / whole : 0}%` }}
            title={`${part.name}: ${part.text}${part.title ? ` – ${part.title}` : ''}`}
          />
        ))}
      </div>
      {props.parts.length > 1 && (
        <ul className="jp-PowerLab-legend">
          {props.parts.map(part => (
            <li key={part.kind} title={part.title}>
              <span className={`jp-PowerLab-key jp-mod-${part.kind}`} aria-hidden="true" />
              {part.name} <span className="jp-PowerLab-number">{part.text}</span>
            </li>
          ))}
        </ul>
      )}
    </div>
  );
}

const [WIDTH, HEIGHT] = [240, 40];

/** The last minutes of one series. */
export function Sparkline(props: { points: IPoint[]; now: number; seconds: number; label: (top: number) => string; scale: (top: number) => string }): JSX.Element {
  const drawn = line(props.points, props.now, props.seconds, WIDTH, HEIGHT);
  return (
    <div className="jp-PowerLab-spark" role="img" aria-label={props.label(drawn.top)}>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
        <path className="jp-PowerLab-sparkArea" d={drawn.area} />
        <path className="jp-PowerLab-sparkLine" d={drawn.line} />
      </svg>
      <span className="jp-PowerLab-sparkTop" aria-hidden="true">
        {drawn.top > 1 ? props.scale(drawn.top) : ''}
      </span>
    </div>
  );
}
