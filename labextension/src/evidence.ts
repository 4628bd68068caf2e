/** What a receipt says, as groups of names and values (power_lab/evidence/receipt.py). Pure; the data may be anybody's. */
import { count, short } from './format.js';

export interface IFact {
  name: string;
  value: string;
  /** The whole value where `value` is shortened. */
  full?: string;
}

export interface IGroup {
  title: string;
  facts: IFact[];
}

/** Says a string in the reader's language, as JupyterLab's translation bundles do. */
export interface IWords {
  __(text: string, ...values: any[]): string;
}

export interface IReceipt {
  headline: string[];
  groups: IGroup[];
}

export const SCHEMA = 'power-lab.receipt/1';
const LONGEST = 200;

/** Null where the data is no receipt of a schema that we know. */
export function read(data: unknown, words: IWords): IReceipt | null {
  const root = section(data);
  if (root['schema'] !== SCHEMA) {
    return null;
  }
  const claim = section(root['claim']);
  const [engine, model, output, prompt] = ['engine', 'model', 'output', 'prompt'].map(name => section(claim[name])) as [Fields, Fields, Fields, Fields];
  const [sampling, observed, digests] = [section(claim['sampling']), section(root['observed']), section(root['digests'])];
  const draft = section(engine['draft']);
  const tokens = number(output['tokens']);
  return {
    headline: [plain(engine['mode']), plain(model['name']), words.__('%1 tokens', count(tokens)), short(plain(digests['claim']))].filter(Boolean),
    groups: [
      { title: words.__('Model'), facts: modelFacts(model, words) },
      { title: words.__('Drafter'), facts: drafterFacts(draft, sampling, words) },
      { title: words.__('Figures'), facts: figures(observed, prompt, output, words) },
      { title: words.__('Digests (SHA-256)'), facts: digestFacts(digests, prompt, output, observed, words) },
      { title: words.__('Settings'), facts: settings(engine, sampling, words) } // the longest: a column of its own where there is room
    ].filter(group => group.facts.length > 0)
  };
}

type Fields = Record<string, unknown>;

function modelFacts(model: Fields, words: IWords): IFact[] {
  return facts([
    [words.__('name'), model['name']],
    [words.__('file'), model['file']],
    [words.__('architecture'), model['architecture']],
    [words.__('parameters'), number(model['parameters']) ? count(number(model['parameters'])) : ''],
    [words.__('weights'), Object.entries(section(model['quantisation'])).map(([kind, n]) => `${kind} × ${number(n) ? count(number(n)) : plain(n)}`).join(', ')],
    [words.__('licence'), model['license']],
    [words.__('file digest'), model['sha256']]
  ]);
}

function drafterFacts(draft: Fields, sampling: Fields, words: IWords): IFact[] {
  const speculate = plain(sampling['speculate']);
  return facts([
    [words.__('speculation'), speculate === 'off' ? words.__('off') : speculate],
    [words.__('kind'), draft['kind']],
    [words.__('name'), draft['name']],
    [words.__('file digest'), draft['sha256']]
  ]);
}

function settings(engine: Fields, sampling: Fields, words: IWords): IFact[] {
  const own: Array<[string, unknown]> = [
    [words.__('mode'), engine['mode']],
    [words.__('device'), engine['device']],
    [words.__('threads'), number(engine['threads']) || ''],
    [words.__('revision'), engine['revision']]
  ];
  // The names are those that one types in a notebook, so they stay as they are in every language.
  const typed = Object.entries(sampling).filter(([name]) => name !== 'speculate');
  const made = Object.entries(section(engine['config'])).filter(([name]) => !(name in engine)); // said above, as it came out
  return facts([...own, ...typed, ...made]);
}

function figures(observed: Fields, prompt: Fields, output: Fields, words: IWords): IFact[] {
  const [tokens, drafted, decode] = [number(output['tokens']), number(observed['drafted']), number(observed['decode_s'])];
  const [asked, cached] = [count(number(prompt['tokens'])), number(observed['cached'])];
  return facts([
    [words.__('prompt tokens'), cached ? words.__('%1 (%2 from the cache)', asked, count(cached)) : asked],
    [words.__('output tokens'), count(tokens)],
    [words.__('ended'), output['finish']],
    [words.__('drafts accepted'), drafted ? words.__('%1 of %2', count(number(observed['accepted'])), count(drafted)) : ''],
    [words.__('rounds'), number(observed['rounds']) ? count(number(observed['rounds'])) : ''],
    [words.__('waiting'), seconds(observed['queue_s'])],
    [words.__('prefill'), seconds(observed['prefill_s'])],
    [words.__('decoding'), decode ? seconds(decode) : ''],
    [words.__('preemptions'), number(observed['preemptions']) || '']
  ]);
}

function digestFacts(digests: Fields, prompt: Fields, output: Fields, observed: Fields, words: IWords): IFact[] {
  return facts([
    [words.__('claim'), digests['claim']],
    [words.__('prompt'), prompt['sha256']],
    [words.__('output'), output['sha256']],
    [words.__('trace'), observed['trace_sha256']]
  ]);
}

/** Facts without the empty ones; digests shortened, long values cut. */
function facts(pairs: Array<[string, unknown]>): IFact[] {
  const made: IFact[] = [];
  for (const [name, value] of pairs) {
    const text = plain(value);
    if (text === '') {
      continue;
    }
    if (/^[0-9a-f]{40,64}$/.test(text)) {
      made.push({ name, value: short(text), full: text });
    } else {
      made.push(text.length > LONGEST ? { name, value: `${text.slice(0, LONGEST)}…`, full: text } : { name, value: text });
    }
  }
  return made;
}

function section(value: unknown): Fields {
  return typeof value === 'object' && value !== null && !Array.isArray(value) ? (value as Fields) : {};
}

function number(value: unknown): number {
  return typeof value === 'number' && Number.isFinite(value) ? value : 0;
}

function seconds(value: unknown): string {
  return typeof value === 'number' && Number.isFinite(value) ? `${value.toLocaleString(undefined, { maximumSignificantDigits: 3 })} s` : '';
}

function plain(value: unknown): string {
  if (value === null || value === undefined) {
    return '';
  }
  if (typeof value === 'object') {
    const empty = Array.isArray(value) ? value.length === 0 : Object.keys(value).length === 0;
    return empty ? '' : JSON.stringify(value);
  }
  return String(value);
}
