import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { htmlRendererFactory, IRenderMimeRegistry, type IRenderMime } from '@jupyterlab/rendermime';
import { ITranslator, nullTranslator, type TranslationBundle } from '@jupyterlab/translation';
import { PanelLayout, Widget } from '@lumino/widgets';

import { type IGroup, read } from './evidence.js';

const MIME = 'application/vnd.power-lab.evidence+json';
const ALONE = '<div data-power-lab-receipt>'; // HTML that says what the receipt does (power_lab/evidence/page.py)
const RANK = 45; // before text/html, which stands in the same bundle for all others

/** The run as everybody sees it, sanitized as any HTML, and under it the receipt, closed. A receipt that is shown for its own sake is open. */
class Receipt extends Widget implements IRenderMime.IRenderer {
  constructor(
    private readonly options: IRenderMime.IRendererOptions,
    private readonly trans: TranslationBundle
  ) {
    super();
    this.addClass('jp-PowerLab');
    this.addClass('jp-PowerLab-evidence');
    this.layout = new PanelLayout();
  }

  async renderModel(model: IRenderMime.IMimeModel): Promise<void> {
    const layout = this.layout as PanelLayout;
    const html = model.data['text/html'];
    const alone = typeof html === 'string' && html.startsWith(ALONE);
    const open = this.node.querySelector('details')?.open ?? alone;
    [...layout.widgets].forEach(widget => widget.dispose());
    if (typeof html === 'string' && !alone) {
      const run = htmlRendererFactory.createRenderer({ ...this.options, mimeType: 'text/html' });
      layout.addWidget(run);
      await run.renderModel(model);
    }
    layout.addWidget(new Widget({ node: draw(model.data[MIME], open, this.trans) }));
  }
}

function draw(data: unknown, open: boolean, trans: TranslationBundle): HTMLElement {
  const receipt = read(data, trans);
  if (!receipt) {
    return element('p', 'jp-PowerLab-quiet', trans.__('A receipt of another version of Power Lab.'));
  }
  const details = element('details', 'jp-PowerLab-receipt');
  details.open = open;
  const summary = element('summary', '', trans.__('Receipt'));
  for (const text of receipt.headline) {
    summary.append(element('span', 'jp-PowerLab-quiet', text));
  }
  const body = element('div', 'jp-PowerLab-receiptBody');
  body.append(...receipt.groups.map(group => drawGroup(group)), copyButton(data, trans));
  details.append(summary, body);
  return details;
}

function drawGroup(group: IGroup): HTMLElement {
  const section = element('section', 'jp-PowerLab-receiptGroup');
  const list = element('dl', '');
  for (const fact of group.facts) {
    const value = element('dd', fact.full ? 'jp-PowerLab-digest' : '', fact.value);
    if (fact.full) {
      value.title = fact.full;
    }
    list.append(element('dt', '', fact.name), value);
  }
  section.append(element('p', 'jp-PowerLab-receiptTitle', group.title), list); // no heading: the levels are the notebook's
  return section;
}

function copyButton(data: unknown, trans: TranslationBundle): HTMLElement {
  const button = element('button', 'jp-PowerLab-button', trans.__('Copy as JSON'));
  button.type = 'button';
  button.onclick = async () => {
    await navigator.clipboard.writeText(JSON.stringify(data, null, 1));
    button.textContent = trans.__('Copied');
  };
  return button;
}

/** Text goes in as text: a notebook may come from anywhere. */
function element<K extends keyof HTMLElementTagNameMap>(tag: K, className: string, text = ''): HTMLElementTagNameMap[K] {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

export const receiptPlugin: JupyterFrontEndPlugin<void> = {
  id: 'power-lab:receipt',
  description: 'Shows the receipt of a run under its text.',
  autoStart: true,
  optional: [IRenderMimeRegistry, ITranslator],
  activate: (_: JupyterFrontEnd, rendermime: IRenderMimeRegistry | null, translator: ITranslator | null): void => {
    const trans = (translator ?? nullTranslator).load('power_lab');
    // Safe without trust: nothing of the data becomes markup but its text/html, which the sanitizer sees as ever.
    rendermime?.addFactory({ safe: true, mimeTypes: [MIME], createRenderer: options => new Receipt(options, trans) }, RANK);
  }
};
