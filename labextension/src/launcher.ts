import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILauncher } from '@jupyterlab/launcher';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';

import { Command } from './names.js';

export const launcherPlugin: JupyterFrontEndPlugin<void> = {
  id: 'power-lab:launcher',
  description: 'A section of the launcher: a notebook, the tour, the layout.',
  autoStart: true,
  optional: [ILauncher, ITranslator],
  activate: (_: JupyterFrontEnd, launcher: ILauncher | null, translator: ITranslator | null): void => {
    const category = (translator ?? nullTranslator).load('power_lab').__('Power Lab');
    [Command.newNotebook, Command.openTour, Command.layout].forEach((command, rank) => launcher?.add({ command, category, rank }));
  }
};
