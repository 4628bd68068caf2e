import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { bytes, clientName, count, duration, percent, rate, ratio } from './format.js';
import type { IPoint, IRates } from './history.js';
import { Bar, ShareStat, Sparkline, Stat } from './parts.js';
import type { Action, IEngine, IRun } from './vitals.js';

export interface IEngineProps {
  engine: IEngine;
  rates: IRates | null;
  points: IPoint[];
  now: number;
  seconds: number;
  trans: TranslationBundle;
  /** False while disconnected: what cannot be asked for is not offered. */
  reachable: boolean;
  act: (action: Action, engine: IEngine) => void;
}

const MOST_RUNS = 4;

/** One engine: what it is, who uses it, how it does, and what may be done with it. */
export function EngineCard(props: IEngineProps): JSX.Element {
  const { engine, trans } = props;
  const details = [engine.device, engine.mode, engine.drafter].filter(Boolean).join(' · ');
  const loading = engine.state === 'loading';
  return (
    <article className="jp-PowerLab-engine" aria-label={engine.model} data-engine={engine.engine}>
      <header className="jp-PowerLab-engineHead">
        <h3 title={engine.model}>{engine.model}</h3>
        <State engine={engine} reachable={props.reachable} trans={trans} />
      </header>
      <p className="jp-PowerLab-quiet" title={engine.drafter ? trans.__('Device · mode · drafter') : trans.__('Device · mode')}>
        {details}
      </p>
      {loading ? <Loading engine={engine} trans={trans} /> : <Figures {...props} />}
      <Users engine={engine} trans={trans} />
      <footer className="jp-PowerLab-actions">
        <ActionButton {...props} action="stop" name={trans.__('Stop')} label={trans.__('Stop %1', engine.model)} disabled={engine.running + engine.waiting === 0} title={trans.__('End the runs in flight; the model stays loaded')} />
        <ActionButton {...props} action="unload" name={trans.__('Unload')} label={trans.__('Unload %1', engine.model)} disabled={false} title={trans.__('Close this engine and free its memory')} />
        <ActionButton {...props} action="restart" name={trans.__('Restart')} label={trans.__('Restart %1', engine.model)} disabled={loading} title={trans.__('Close this engine and load it again')} />
      </footer>
    </article>
  );
}

function ActionButton(props: IEngineProps & { action: Action; name: string; label: string; disabled: boolean; title: string }): JSX.Element {
  return (
    <button
      type="button"
      className="jp-PowerLab-button"
      disabled={props.disabled || !props.reachable}
      title={props.title}
      aria-label={props.label}
      onClick={() => props.act(props.action, props.engine)}
    >
      {props.name}
    </button>
  );
}

function State(props: { engine: IEngine; reachable: boolean; trans: TranslationBundle }): JSX.Element {
  const { engine, trans } = props;
  if (!props.reachable) {
    return <span className="jp-PowerLab-state">{trans.__('last known')}</span>;
  }
  if (engine.state === 'loading') {
    return <span className="jp-PowerLab-state jp-mod-loading">{trans.__('loading')}</span>;
  }
  return engine.running > 0 ? (
    <span className="jp-PowerLab-state jp-mod-running">{trans.__('running')}</span>
  ) : (
    <span className="jp-PowerLab-state">{trans.__('idle')}</span>
  );
}

function Loading(props: { engine: IEngine; trans: TranslationBundle }): JSX.Element {
  return (
    <div className="jp-PowerLab-loading">
      <div className="jp-PowerLab-progress" aria-hidden="true" />
      <span>{props.engine.stage || props.trans.__('starting')}</span>
    </div>
  );
}

function Figures(props: IEngineProps): JSX.Element {
  const { engine, rates, trans } = props;
  const since = { recent: trans.__('Over the last two seconds.'), ever: trans.__('Since this engine began.') };
  const minutes = duration(props.seconds);
  const steps = engine.replays + engine.captures + engine.eager;
  return (
    <>
      <div className="jp-PowerLab-speed">
        <div>
          <span className="jp-PowerLab-big">{rate(rates?.tokensPerS)}</span>
          <span className="jp-PowerLab-quiet"> {trans.__('tokens/s')}</span>
        </div>
        <Sparkline
          points={props.points}
          now={props.now}
          seconds={props.seconds}
          label={top => trans.__('Tokens a second over the last %1, on a scale to %2', minutes, rate(top))}
          scale={rate}
        />
      </div>
      <dl className="jp-PowerLab-stats">
        <Stat name={trans.__('running')} value={count(engine.running)} title={trans.__('Requests being worked on')} />
        <Stat name={trans.__('waiting')} value={count(engine.waiting)} title={trans.__('Requests in the queue')} />
        <Stat name={trans.__('batch')} value={count(engine.rows)} title={trans.__('Rows of the last step')} />
        <ShareStat name={trans.__('acceptance')} share={rates?.acceptance} format={percent} meaning={trans.__('Accepted of drafted tokens.')} since={since} />
        <ShareStat name={trans.__('tokens/pass')} share={rates?.tokensPerPass} format={ratio} meaning={trans.__('Tokens for each pass of the target model.')} since={since} />
        <ShareStat name={trans.__('cache hits')} share={rates?.hitRate} format={percent} meaning={trans.__('Prompt tokens that were served from the prefix cache.')} since={since} />
        <ShareStat name={trans.__('graph hits')} share={rates?.graphHits} format={percent} meaning={trans.__('Of %1 steps, those that replayed a recorded graph.', count(steps))} since={since} />
      </dl>
      <Blocks {...props} />
      <Memory {...props} />
    </>
  );
}

function Blocks(props: IEngineProps): JSX.Element {
  const { engine, trans } = props;
  const parts = [
    { kind: 'used', name: trans.__('in use'), size: engine.used_blocks, text: count(engine.used_blocks) },
    { kind: 'cached', name: trans.__('cached'), size: engine.cached_blocks, text: count(engine.cached_blocks), title: trans.__('finished prefixes, given up when room is needed') },
    { kind: 'free', name: trans.__('free'), size: engine.free_blocks, text: count(engine.free_blocks) }
  ];
  const all = engine.used_blocks + engine.cached_blocks + engine.free_blocks;
  return <Bar name={trans.__('KV blocks')} value={count(all)} parts={parts} />;
}

function Memory(props: IEngineProps): JSX.Element {
  const { engine, trans } = props;
  const parts = [
    { kind: 'weights', name: trans.__('weights'), size: engine.weights_bytes },
    { kind: 'pool', name: trans.__('KV pool'), size: engine.pool_bytes },
    { kind: 'graphs', name: trans.__('graphs'), size: engine.graph_bytes },
    { kind: 'workspace', name: trans.__('workspace'), size: engine.workspace_bytes }
  ]
    .filter(part => part.size > 0)
    .map(part => ({ ...part, text: bytes(part.size) }));
  const all = parts.reduce((sum, part) => sum + part.size, 0);
  return <Bar name={trans.__('Memory')} value={bytes(all)} parts={parts} />;
}

function Users(props: { engine: IEngine; trans: TranslationBundle }): JSX.Element {
  const { engine, trans } = props;
  const paths = engine.clients.join(', ');
  const names = engine.clients.map(clientName).join(', ');
  const ends = engine.ends_in_s;
  return (
    <div className="jp-PowerLab-users">
      {names ? (
        <p title={paths}>{trans.__('Used by %1', names)}</p>
      ) : (
        <p className="jp-PowerLab-quiet">
          {ends === null ? trans.__('Used by no notebook') : trans.__('Used by no notebook; closes in %1', duration(ends))}
        </p>
      )}
      {engine.runs.length > 0 && (
        <ul className="jp-PowerLab-runs" aria-label={trans.__('Runs in flight')}>
          {engine.runs.slice(0, MOST_RUNS).map(run => (
            <RunLine key={run.run} run={run} trans={trans} />
          ))}
          {engine.runs.length > MOST_RUNS && <li>{trans.__('and %1 more', engine.runs.length - MOST_RUNS)}</li>}
        </ul>
      )}
    </div>
  );
}

function RunLine(props: { run: IRun; trans: TranslationBundle }): JSX.Element {
  const { run, trans } = props;
  return (
    <li>
      <span className="jp-PowerLab-runName" title={run.client}>
        {clientName(run.client) || trans.__('run %1', run.run)}
      </span>
      <span className="jp-PowerLab-number">{trans._n('%2 token', '%2 tokens', run.tokens, count(run.tokens))}</span>
      <span className="jp-PowerLab-number">{duration(run.age_s)}</span>
    </li>
  );
}
