import { ILabShell, ILayoutRestorer, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { ReactWidget } from '@jupyterlab/ui-components';
import type { CommandRegistry } from '@lumino/commands';
import type { IDisposable } from '@lumino/disposable';
import * as React from 'react';

import { Command } from './names.js';
import { oncePerFrame } from './frames.js';
import { markIcon } from './icons.js';
import { IPowerClient } from './tokens.js';
import { PanelView } from './view.js';

const PANEL = 'power-lab-panel';
const RANK = 950; // after JupyterLab's own panels of the right side

/** It counts as a viewer only while it is visible; hidden it neither asks nor draws. */
class Panel extends ReactWidget {
  constructor(
    private readonly client: IPowerClient,
    private readonly commands: CommandRegistry,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.id = PANEL;
    this.addClass('jp-PowerLab');
    this.addClass('jp-PowerLab-panel');
    this.title.icon = markIcon;
    this.title.caption = trans.__('Power Lab: engines');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', trans.__('Power Lab: engines'));
    this.node.tabIndex = 0; // it scrolls, so the keyboard must be able to reach it
    const draw = oncePerFrame(() => this.isVisible && !this.isDisposed && this.update());
    client.changed.connect(draw, this);
  }

  protected override onAfterShow(): void {
    this._viewing ??= this.client.watch();
    this.update();
  }

  protected override onAfterHide(): void {
    this._viewing?.dispose();
    this._viewing = null;
  }

  protected override onAfterAttach(message: any): void {
    super.onAfterAttach(message);
    if (this.isVisible) {
      this.onAfterShow();
    }
  }

  protected override onBeforeDetach(message: any): void {
    this.onAfterHide();
    super.onBeforeDetach(message);
  }

  protected override render(): JSX.Element {
    return (
      <PanelView
        client={this.client}
        trans={this.trans}
        act={(action, engine) => void this.commands.execute(`power-lab:${action}`, { engine: engine.engine })}
        begin={what => void this.commands.execute(what === 'tour' ? Command.openTour : Command.newNotebook)}
      />
    );
  }

  private _viewing: IDisposable | null = null;
}

export const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: 'power-lab:panel',
  description: 'A side panel with the engines of all notebooks.',
  autoStart: true,
  requires: [IPowerClient],
  optional: [ILabShell, ILayoutRestorer, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    client: IPowerClient,
    labShell: ILabShell | null,
    restorer: ILayoutRestorer | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('power_lab');
    const panel = new Panel(client, app.commands, trans);
    app.shell.add(panel, 'right', { rank: RANK, type: 'Power Lab' });
    restorer?.add(panel, PANEL);
    app.commands.addCommand(Command.openPanel, {
      label: trans.__('Show Engines'),
      caption: trans.__('Open the side panel with the engines of all notebooks'),
      icon: markIcon,
      describedBy: { args: { type: 'object', properties: {} } },
      execute: () => {
        app.shell.activateById(PANEL);
        if (!labShell) {
          (app.shell as any).expandRight?.(PANEL); // Notebook 7 keeps its side panels closed until asked
        }
      }
    });
  }
};
