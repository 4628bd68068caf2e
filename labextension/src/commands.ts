import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { Dialog, ICommandPalette, InputDialog, Notification, showDialog } from '@jupyterlab/apputils';
import { PathExt } from '@jupyterlab/coreutils';
import { IDefaultFileBrowser } from '@jupyterlab/filebrowser';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';

import { RequestFailed } from './feed.js';
import { clientName } from './format.js';
import { logoIcon, markIcon, tourIcon } from './icons.js';
import { translateMenu } from './menu.js';
import { Command, KERNEL } from './names.js';
import { begin } from './starter.js';
import { IPowerClient } from './tokens.js';
import type { Action, IEngine } from './vitals.js';

/** Where `power-lab lab` puts the tour: in a checkout, and as a copy in the folder that it was started in. */
const TOURS = ['notebooks/tour.ipynb', 'power-lab-notebooks/tour.ipynb', 'tour.ipynb'];

const ONE_ENGINE = {
  args: { type: 'object', properties: { engine: { type: 'string', description: 'Key of the engine; asked for where there are several.' } } }
};
const NO_ARGUMENTS = { args: { type: 'object', properties: {} } };

/** What is done to engines: one confirmation that says whom it hits, one note if it fails. */
class Actions {
  constructor(
    private readonly client: IPowerClient,
    private readonly trans: TranslationBundle
  ) {}

  get engines(): IEngine[] {
    return this.client.vitals?.engines ?? [];
  }

  get busy(): IEngine[] {
    return this.engines.filter(engine => engine.running + engine.waiting > 0);
  }

  async one(action: Action, args: ReadonlyPartialJSONObject): Promise<void> {
    const engine = await this._choose(action, args['engine']);
    if (engine && (await this._confirm(action, [engine]))) {
      await this._send(action, engine);
    }
  }

  async stopAll(): Promise<void> {
    const engines = this.busy;
    if (engines.length > 0 && (await this._confirm('stop', engines))) {
      await Promise.all(engines.map(engine => this._send('stop', engine)));
    }
  }

  private async _choose(action: Action, key: unknown): Promise<IEngine | undefined> {
    const engines = action === 'stop' && key === undefined ? this.busy : this.engines;
    if (key !== undefined || engines.length < 2) {
      return key === undefined ? engines[0] : engines.find(engine => engine.engine === key);
    }
    const names = engines.map((engine, index) => `${index + 1}. ${engine.model} (${engine.device}, ${engine.mode})`);
    const title = { stop: this.trans.__('Stop which engine?'), unload: this.trans.__('Unload which engine?'), restart: this.trans.__('Restart which engine?') };
    const chosen = await InputDialog.getItem({ title: title[action], items: names, label: this.trans.__('Engine') });
    return chosen.value === null ? undefined : engines[names.indexOf(chosen.value)];
  }

  private async _confirm(action: Action, engines: IEngine[]): Promise<boolean> {
    const { trans } = this;
    const runs = engines.reduce((sum, engine) => sum + engine.running + engine.waiting, 0);
    const users = [...new Set(engines.flatMap(engine => engine.clients))];
    const sentences = {
      stop: [trans.__('The model stays loaded.')],
      unload: [trans.__('Its memory is freed. A notebook that still wants it has to load it again.')],
      restart: [trans.__('It is closed and loaded anew with the same settings. Its cached prefixes are lost.')]
    }[action];
    if (runs > 0) {
      sentences.unshift(trans._n('%1 run ends as cancelled.', '%1 runs end as cancelled.', runs));
    }
    if (users.length > 0) {
      sentences.push(trans.__('In use by %1.', users.map(clientName).join(', ')));
    }
    const verb = { stop: trans.__('Stop'), unload: trans.__('Unload'), restart: trans.__('Restart') }[action];
    const model = engines[0]!.model;
    const one = { stop: trans.__('Stop %1?', model), unload: trans.__('Unload %1?', model), restart: trans.__('Restart %1?', model) }[action];
    const answer = await showDialog({
      title: engines.length === 1 ? one : trans._n('Stop %1 engine?', 'Stop %1 engines?', engines.length), // no other action has several
      body: sentences.join(' '),
      buttons: [Dialog.cancelButton({ label: trans.__('Cancel') }), Dialog.warnButton({ label: verb })]
    });
    return answer.button.accept;
  }

  private async _send(action: Action, engine: IEngine): Promise<void> {
    const { trans } = this;
    try {
      await this.client.request(action, engine);
    } catch (error) {
      const said = error instanceof RequestFailed && error.message ? `${error.message} ${error.remedy}` : trans.__('the connection ended');
      const failed = {
        stop: trans.__('%1 could not be stopped: %2', engine.model, said),
        unload: trans.__('%1 could not be unloaded: %2', engine.model, said),
        restart: trans.__('%1 could not be restarted: %2', engine.model, said)
      }[action];
      Notification.error(failed.trim(), { autoClose: false }); // without the option it would only count up in the status bar
    }
  }
}

async function openTour(app: JupyterFrontEnd, trans: TranslationBundle): Promise<unknown> {
  for (const path of TOURS) {
    try {
      await app.serviceManager.contents.get(PathExt.dirname(path)).then(folder => {
        if (!folder.content?.some((entry: { name: string }) => entry.name === PathExt.basename(path))) {
          throw new Error(path);
        }
      });
    } catch {
      continue; // looked for in the next place
    }
    return app.commands.execute('docmanager:open', { path });
  }
  return showDialog({
    title: trans.__('The tour is not in this folder'),
    body: trans.__('Start JupyterLab with “power-lab lab” in a terminal: it puts the tour and the lessons beside your notebooks.'),
    buttons: [Dialog.okButton({ label: trans.__('OK') })]
  });
}

export const commandsPlugin: JupyterFrontEndPlugin<void> = {
  id: 'power-lab:commands',
  description: 'Commands of Power Lab, with palette and menu entries.',
  autoStart: true,
  requires: [IPowerClient],
  optional: [ICommandPalette, IDefaultFileBrowser, ITranslator],
  activate: (
    app: JupyterFrontEnd,
    client: IPowerClient,
    palette: ICommandPalette | null,
    browser: IDefaultFileBrowser | null,
    translator: ITranslator | null
  ): void => {
    const trans = (translator ?? nullTranslator).load('power_lab');
    const actions = new Actions(client, trans);
    const { commands } = app;
    const live = (): boolean => client.link === 'live';

    commands.addCommand(Command.stop, {
      label: trans.__('Stop an Engine…'),
      caption: trans.__('End the runs in flight of one engine'),
      describedBy: ONE_ENGINE,
      isEnabled: () => live() && actions.busy.length > 0,
      execute: args => actions.one('stop', args)
    });
    commands.addCommand(Command.stopAll, {
      label: trans.__('Stop All Runs…'),
      caption: trans.__('End the runs in flight of all engines'),
      describedBy: NO_ARGUMENTS,
      isEnabled: () => live() && actions.busy.length > 0,
      execute: () => actions.stopAll()
    });
    commands.addCommand(Command.unload, {
      label: trans.__('Unload an Engine…'),
      caption: trans.__('Close an engine and free its memory'),
      describedBy: ONE_ENGINE,
      isEnabled: () => live() && actions.engines.length > 0,
      execute: args => actions.one('unload', args)
    });
    commands.addCommand(Command.restart, {
      label: trans.__('Restart an Engine…'),
      caption: trans.__('Close an engine and load it again'),
      describedBy: ONE_ENGINE,
      isEnabled: () => live() && actions.engines.length > 0,
      execute: args => actions.one('restart', args)
    });
    commands.addCommand(Command.newNotebook, {
      label: args => (args['isPalette'] ? trans.__('New Power Lab Notebook') : trans.__('Notebook')),
      caption: trans.__('A new notebook with the Power Lab kernel and the first steps in it'),
      icon: args => (args['isPalette'] ? markIcon : logoIcon),
      describedBy: { args: { type: 'object', properties: { cwd: { type: 'string', description: 'Folder to make it in.' } } } },
      execute: async args => {
        const cwd = (args['cwd'] as string | undefined) ?? browser?.model.path ?? '';
        const made: unknown = await commands.execute('notebook:create-new', { cwd, kernelName: KERNEL });
        await begin(made, trans);
        return made;
      }
    });
    commands.addCommand(Command.openTour, {
      label: args => (args['isPalette'] ? trans.__('Open the Power Lab Tour') : trans.__('Tour')),
      caption: trans.__('Ten minutes, one idea a cell'),
      icon: args => (args['isPalette'] ? markIcon : tourIcon),
      describedBy: NO_ARGUMENTS,
      execute: () => openTour(app, trans)
    });
    void translateMenu(app, trans);
    const category = trans.__('Power Lab');
    for (const command of Object.values(Command)) {
      palette?.addItem({ command, category, args: { isPalette: true } });
    }
    client.changed.connect(() => {
      const now = `${client.link} ${actions.engines.length} ${actions.busy.length}`;
      if (now !== state) {
        state = now;
        [Command.stop, Command.stopAll, Command.unload, Command.restart].forEach(name => commands.notifyCommandChanged(name));
      }
    });
    let state = '';
  }
};
