import type { TranslationBundle } from '@jupyterlab/translation';
import * as React from 'react';

import { EngineCard } from './engine.js';
import { bytes, duration, percent } from './format.js';
import { logoIcon } from './icons.js';
import { Bar, Stat } from './parts.js';
import type { IPowerClient } from './tokens.js';
import type { Action, IDevice, IEngine, IVitals } from './vitals.js';

export interface IViewProps {
  client: IPowerClient;
  trans: TranslationBundle;
  act: (action: Action, engine: IEngine) => void;
  begin: (what: 'notebook' | 'tour') => void;
}

/** The whole panel: a note where something is amiss, the engines, the device. */
export function PanelView(props: IViewProps): JSX.Element {
  const { client, trans } = props;
  const { link, vitals } = client;
  const stale = ['disconnected', 'unavailable', 'trouble'].includes(link);
  return (
    <div className={`jp-PowerLab-view${stale ? ' jp-mod-stale' : ''}`}>
      <Note client={client} trans={trans} />
      {vitals && vitals.engines.length > 0 ? (
        <>
          {vitals.engines.map(engine => (
            <EngineCard
              key={engine.engine}
              engine={engine}
              rates={client.rates(engine)}
              points={client.points(engine)}
              now={vitals.at}
              seconds={client.seconds}
              trans={trans}
              reachable={link === 'live'}
              act={props.act}
            />
          ))}
          <Device device={vitals.device} trans={trans} />
          <Host vitals={vitals} trans={trans} />
        </>
      ) : (
        <Nothing {...props} />
      )}
    </div>
  );
}

/** The one live region: it speaks when the connection changes and is silent otherwise. */
function Note(props: { client: IPowerClient; trans: TranslationBundle }): JSX.Element {
  const { client, trans } = props;
  const { link, error, vitals } = client;
  let text: React.ReactNode = null;
  if (link === 'disconnected') {
    text = (
      <>
        <strong>{trans.__('Disconnected')}</strong>
        <span>{vitals ? trans.__('These are the last known values. Trying again…') : trans.__('Trying again…')}</span>
        <button type="button" className="jp-PowerLab-button" onClick={() => client.retry()}>
          {trans.__('Try now')}
        </button>
      </>
    );
  } else if (error) {
    text = (
      <>
        <strong>{error.message}</strong>
        {error.remedy && <span>{error.remedy}</span>}
      </>
    );
  } else if (link === 'paused' && vitals) {
    text = <span>{trans.__('Paused: move the pointer or press a key to go on.')}</span>;
  }
  const kind = link === 'disconnected' ? ' jp-mod-warn' : error ? ' jp-mod-error' : '';
  return (
    <div role="status" className={text ? `jp-PowerLab-note${kind}` : 'jp-PowerLab-silent'}>
      {text}
    </div>
  );
}

function Nothing(props: IViewProps): JSX.Element {
  const { client, trans, begin } = props;
  if (client.link === 'unavailable') {
    return (
      <div className="jp-PowerLab-empty">
        <logoIcon.react className="jp-PowerLab-logo" tag="span" aria-hidden="true" />
        <h3>{trans.__('The server does not answer')}</h3>
        <p>{trans.__('This page found no Power Lab server extension. Type this in a terminal; it says what is missing:')}</p>
        <code>power-lab doctor</code>
        <div className="jp-PowerLab-actions">
          <button type="button" className="jp-PowerLab-button" onClick={() => client.retry()}>
            {trans.__('Try now')}
          </button>
        </div>
      </div>
    );
  }
  if (['connecting', 'disconnected', 'trouble'].includes(client.link)) {
    return (
      <div className="jp-PowerLab-empty">
        <div className="jp-PowerLab-progress" aria-hidden="true" />
        <p className="jp-PowerLab-quiet">{trans.__('Looking for engines')}</p>
      </div>
    );
  }
  const { lost } = client;
  return (
    <div className="jp-PowerLab-empty">
      <logoIcon.react className="jp-PowerLab-logo" tag="span" aria-hidden="true" />
      <h3>{lost.length > 0 ? trans.__('Disconnected') : trans.__('No engine is running')}</h3>
      {lost.length > 0 ? (
        <p>{trans.__('The engine host has ended, and %1 with it. A notebook that goes on starts a new one, or run:', lost.join(', '))}</p>
      ) : (
        <p>{trans.__('An engine starts when a notebook loads a model. In a Power Lab notebook, run:')}</p>
      )}
      <code>lab.load(&quot;smollm2&quot;)</code>
      <div className="jp-PowerLab-actions">
        <button type="button" className="jp-PowerLab-button jp-mod-accept" onClick={() => begin('notebook')}>
          {trans.__('New notebook')}
        </button>
        <button type="button" className="jp-PowerLab-button" onClick={() => begin('tour')}>
          {trans.__('Open the tour')}
        </button>
      </div>
    </div>
  );
}

/** Only what can be read: a machine without a GPU has no temperature, and an empty row says nothing. */
function Device(props: { device: IDevice; trans: TranslationBundle }): JSX.Element | null {
  const { device, trans } = props;
  const { memory_used: used, memory_total: total } = device;
  const stats = [
    device.utilisation !== null && { name: trans.__('busy'), value: percent(device.utilisation) },
    device.temperature_c !== null && { name: trans.__('temperature'), value: `${Math.round(device.temperature_c)} °C` },
    device.power_w !== null && { name: trans.__('power'), value: `${Math.round(device.power_w)} W` }
  ].filter(stat => stat !== false);
  if ((used === null || total === null) && stats.length === 0) {
    return null;
  }
  return (
    <section className="jp-PowerLab-device" aria-label={trans.__('Device')}>
      <h3 title={device.name}>{device.name || trans.__('Device')}</h3>
      {used !== null && total !== null && (
        <Bar
          name={trans.__('Memory')}
          value={trans.__('%1 of %2', bytes(used), bytes(total))}
          whole={total}
          parts={[{ kind: 'used', name: trans.__('in use'), size: used, text: bytes(used) }]}
        />
      )}
      {stats.length > 0 && (
        <dl className="jp-PowerLab-stats">
          {stats.map(stat => (
            <Stat key={stat.name} name={stat.name} value={stat.value} />
          ))}
        </dl>
      )}
    </section>
  );
}

function Host(props: { vitals: IVitals; trans: TranslationBundle }): JSX.Element {
  const { vitals, trans } = props;
  return (
    <p className="jp-PowerLab-host jp-PowerLab-quiet" title={trans.__('Revision %1', vitals.revision)}>
      {trans.__('Engine host %1 · process %2 · up %3', vitals.package, vitals.pid, duration(vitals.uptime_s))}
    </p>
  );
}
