import { ILabShell, type JupyterFrontEnd, type JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import type { Widget } from '@lumino/widgets';

import { besideIcon, markIcon } from './icons.js';
import { Command } from './names.js';

export const layoutPlugin: JupyterFrontEndPlugin<void> = {
  id: 'power-lab:layout',
  description: 'A layout for working with engines: the notebook left, the panel right.',
  autoStart: true,
  optional: [ILabShell, ITranslator],
  activate: (app: JupyterFrontEnd, shell: ILabShell | null, translator: ITranslator | null): void => {
    const trans = (translator ?? nullTranslator).load('power_lab');
    app.commands.addCommand(Command.layout, {
      label: args => (args['isPalette'] ? trans.__('Power Lab Layout') : trans.__('Side by Side')),
      caption: trans.__('The notebook on the left, the engines on the right'),
      icon: args => (args['isPalette'] ? markIcon : besideIcon),
      describedBy: { args: { type: 'object', properties: {} } },
      execute: async () => {
        const notebook = shell ? openNotebook(shell) : null;
        if (shell) {
          shell.collapseLeft();
          if (notebook) {
            shell.activateById(notebook.id);
          } else {
            await app.commands.execute(Command.newNotebook);
          }
        }
        await app.commands.execute(Command.openPanel);
      }
    });
  }
};

/** The notebook in front, or else any that is open. */
function openNotebook(shell: ILabShell): Widget | null {
  const isNotebook = (widget: Widget | null): boolean => widget?.hasClass('jp-NotebookPanel') ?? false;
  return isNotebook(shell.currentWidget) ? shell.currentWidget : ([...shell.widgets('main')].find(isNotebook) ?? null);
}
