import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { IDisposable } from '@lumino/disposable';
import * as React from 'react';

import { oncePerFrame } from './frames.js';
import { markIcon } from './icons.js';
import { Command } from './names.js';
import { follow } from './settings.js';
import { type ISummary, summary } from './summary.js';
import { IPowerClient } from './tokens.js';

const MOST_HZ = 2; // a line that changes faster is not read

class Status extends ReactWidget {
  constructor(
    private readonly client: IPowerClient,
    private readonly trans: TranslationBundle,
    private readonly open: () => void
  ) {
    super();
    this.addClass('jp-PowerLab');
    this.addClass('jp-PowerLab-status');
    const draw = oncePerFrame(() => this.isVisible && this.update());
    client.changed.connect(draw, this);
  }

  protected override onAfterAttach(message: any): void {
    super.onAfterAttach(message);
    this._watch(this.isVisible);
  }

  protected override onAfterShow(): void {
    this._watch(true);
    this.update();
  }

  protected override onAfterHide(): void {
    this._watch(false);
  }

  protected override onBeforeDetach(message: any): void {
    this._watch(false);
    super.onBeforeDetach(message);
  }

  protected override render(): JSX.Element {
    const { client, trans } = this;
    const state = summary(client.link, client.vitals?.engines ?? [], engine => client.rates(engine)?.tokensPerS ?? 0, client.lost.length > 0);
    const [text, more] = words(state, trans);
    return (
      <button type="button" className={`jp-PowerLab-statusButton jp-mod-${state.mood}`} title={more} onClick={this.open}>
        <markIcon.react tag="span" className="jp-PowerLab-statusIcon" aria-hidden="true" />
        <span className="jp-PowerLab-statusText">{text}</span>
        {state.mood === 'running' && (
          <span className="jp-PowerLab-number">{trans.__('%1 tok/s', state.speed)}</span>
        )}
      </button>
    );
  }

  private _watch(on: boolean): void {
    if (on) {
      this._watching ??= this.client.watch(MOST_HZ);
    } else {
      this._watching?.dispose();
      this._watching = null;
    }
  }

  private _watching: IDisposable | null = null;
}

function words(state: ISummary, trans: TranslationBundle): [string, string] {
  const open = trans.__('Click to show the engines.');
  const name = state.others > 0 ? trans.__('%1 +%2', state.model, state.others) : state.model;
  switch (state.mood) {
    case 'broken':
      return [trans.__('disconnected'), trans.__('Power Lab does not answer. %1', open)];
    case 'waiting':
      return [trans.__('Power Lab'), trans.__('Looking for engines. %1', open)];
    case 'none':
      return [trans.__('no engine'), trans.__('Power Lab: no engine is running. %1', open)];
    case 'loading':
      return [trans.__('%1 loading', name), trans.__('%1 is being loaded. %2', state.model, open)];
    case 'running':
      return [name, trans.__('%1 is running: %2 tokens/s. %3', state.model, state.speed, open)];
    default:
      return [trans.__('%1 idle', name), trans.__('%1 is ready. %2', state.model, open)];
  }
}

export const statusPlugin: JupyterFrontEndPlugin<void> = {
  id: 'power-lab:status',
  description: 'Model, speed and state of the engines in the status bar.',
  autoStart: true,
  requires: [IPowerClient],
  optional: [IStatusBar, ISettingRegistry, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    client: IPowerClient,
    bar: IStatusBar | null,
    registry: ISettingRegistry | null,
    translator: ITranslator | null
  ): void => {
    if (!bar) {
      return;
    }
    const trans = (translator ?? nullTranslator).load('power_lab');
    let shown: IDisposable | null = null;
    const show = (wanted: boolean): void => {
      if (wanted && !shown) {
        const item = new Status(client, trans, () => void app.commands.execute(Command.openPanel));
        shown = bar.registerStatusItem(statusPlugin.id, { item, align: 'left', rank: 3, priority: 1 });
      } else if (!wanted) {
        shown?.dispose();
        shown = null;
      }
    };
    if (!registry) {
      show(true);
      return;
    }
    const read = (settings: ISettingRegistry.ISettings): void => show(settings.composite['show'] !== false);
    void follow(registry, statusPlugin.id, trans, read);
  }
};
