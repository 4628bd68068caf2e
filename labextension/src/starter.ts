import type { TranslationBundle } from '@jupyterlab/translation';

/** As much of a notebook as is used here: a panel of JupyterLab; Notebook 7 opens another tab and hands out nothing. */
interface INotebook {
  context: { ready: Promise<void>; model: { sharedModel: ISharedNotebook } };
}

interface ISharedNotebook {
  readonly cells: readonly { source: string }[];
  insertCells(index: number, cells: { cell_type: 'code'; source: string }[]): void;
}

/** The first minutes of somebody who has not read anything, a step a cell. Pure. */
export function firstSteps(trans: Pick<TranslationBundle, '__'>): string[] {
  const note = (text: string): string => `  # ${text.replace(/\s+/g, ' ')}`; // one line, whatever a translation is
  return [
    `lab.load("smollm2")${note(trans.__('a small model, 93 MB; Shift+Enter runs a cell'))}`,
    `lab.watch()${note(trans.__('the engine, live'))}`,
    `run = lab.generate("Why is the sky blue?", max_tokens=64)${note(trans.__('or %%generate, and plain text below it'))}`,
    `lab.inspect.timeline(run)${note(trans.__('for more views type lab.inspect. and press Tab'))}`
  ];
}

/** Put the first steps into a notebook that was just made. One that has any text is left alone. */
export async function begin(made: unknown, trans: Pick<TranslationBundle, '__'>): Promise<void> {
  const notebook = made as Partial<INotebook> | null | undefined;
  await notebook?.context?.ready;
  const shared = notebook?.context?.model.sharedModel;
  if (!shared || shared.cells.some(cell => cell.source !== '')) {
    return;
  }
  const cells = firstSteps(trans).map(source => ({ cell_type: 'code' as const, source }));
  shared.insertCells(0, cells); // the empty cell stays, below them
}
