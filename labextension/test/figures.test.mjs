import assert from 'node:assert/strict';
import { test } from 'node:test';

import { read } from '../lib/evidence.js';
import { baseName, bytes, clientName, duration, percent, rate } from '../lib/format.js';
import { History } from '../lib/history.js';
import { ceiling, line } from '../lib/sparkline.js';
import { summary } from '../lib/summary.js';

const engine = (key, changes) => ({
  engine: key, model: key, state: 'ready', running: 0, steps: 0, tokens: 0, prompt_tokens: 0, cached_tokens: 0, drafted: 0, accepted: 0,
  passes: 0, tokens_per_s: 0, prompt_tokens_per_s: 0, replays: 0, captures: 0, eager: 0, ...changes
});
const sample = (at, ...engines) => ({ kind: 'vitals', at, engines });
const words = { __: (text, ...values) => values.reduce((said, value, index) => said.replace(`%${index + 1}`, value), text) };

test('rates come from counters over two seconds, whatever the pace of the samples', () => {
  for (const pace of [0.05, 0.25, 1]) {
    const history = new History(120);
    for (let step = 0; step * pace <= 10; step += 1) {
      history.add(sample(1000 + step * pace, engine('a', { steps: step, tokens: 50 * step * pace, drafted: 40 * step * pace, accepted: 10 * step * pace })));
    }
    assert.ok(Math.abs(history.rates('a').tokensPerS - 50) < 1e-6);
    assert.deepEqual(history.rates('a').acceptance, { value: 0.25, recent: true });
    assert.deepEqual(history.rates('a').hitRate, { value: null, recent: false });
  }
});

test('what rests keeps the shares of its life, marked as such', () => {
  const history = new History(120);
  for (let at = 0; at < 10; at += 1) history.add(sample(at, engine('a', { drafted: 8, accepted: 6 })));
  assert.deepEqual(history.rates('a').acceptance, { value: 0.75, recent: false });
  assert.equal(history.rates('a').tokensPerS, 0);
});

test('history is bounded in time and in points, and forgets engines that are gone', () => {
  const history = new History(120);
  for (let step = 0; step < 20 * 600; step += 1) history.add(sample(step / 20, engine('a', { steps: step })));
  const points = history.points('a');
  assert.ok(points.length <= 242, String(points.length));
  assert.ok(points.at(-1).at - points[0].at <= 120);
  history.add(sample(700));
  assert.deepEqual(history.points('a'), []);
  assert.equal(history.rates('a'), null);
});

test('an engine that was loaded anew starts anew', () => {
  const history = new History(120);
  history.add(sample(1, engine('a', { steps: 90, tokens: 900 })));
  history.add(sample(2, engine('a', { steps: 1, tokens: 3 })));
  assert.equal(history.points('a').length, 1);
  assert.ok(history.rates('a').tokensPerS >= 0);
});

test('a line has a gap where nothing was heard, and stays within its box', () => {
  const drawn = line([{ at: 0, value: 3 }, { at: 1, value: 7 }, { at: 60, value: 10 }], 60, 60, 240, 40);
  assert.equal(drawn.top, 10);
  assert.equal(drawn.line.match(/M/g).length, 2);
  for (const [, x, y] of drawn.line.matchAll(/[ML]([\d.-]+) ([\d.-]+)/g)) {
    assert.ok(x >= 0 && x <= 240 && y >= 0 && y <= 40, `${x} ${y}`);
  }
  assert.deepEqual(line([], 60, 60, 240, 40), { line: '', area: '', top: 1 });
});

test('scales step through 1, 2, 5', () => {
  assert.deepEqual([0, 1, 1.5, 3, 9, 42, 100, 101].map(ceiling), [1, 1, 2, 5, 10, 50, 100, 200]);
});

test('numbers read well', () => {
  assert.deepEqual([0, 8.44, 84.2, null, NaN].map(rate), ['0', '8.4', '84', '–', '–']);
  assert.deepEqual([0, 1023, 1536, 98 * 2 ** 20, 141 * 2 ** 30].map(bytes), ['0 B', '1023 B', '1.5 KiB', '98.0 MiB', '141 GiB']);
  assert.deepEqual([3, 89, 200, 7500].map(duration), ['3 s', '89 s', '3 min', '2 h 05 min']);
  assert.equal(percent(0.745), '75%');
});

test('the status bar names what works', () => {
  const [idle, busy] = [engine('idle'), engine('busy', { running: 2 })];
  const speed = one => (one === busy ? 84 : 0);
  assert.deepEqual(summary('live', [idle, busy], speed), { mood: 'running', model: 'busy', others: 1, tokensPerS: 84, speed: '84' });
  assert.equal(summary('live', [engine('x', { state: 'loading' })], speed).mood, 'loading');
  assert.equal(summary('live', [idle], speed).mood, 'idle');
  assert.equal(summary('nohost', [], speed).mood, 'none');
  assert.equal(summary('connecting', [], speed).mood, 'waiting');
  assert.equal(summary('nohost', [], speed, true).mood, 'broken');
  for (const link of ['disconnected', 'unavailable', 'trouble']) assert.equal(summary(link, [busy], speed).mood, 'broken');
});

test('a receipt is read whatever is in it', () => {
  assert.equal(read(null, words), null);
  assert.equal(read({ schema: 'power-lab.receipt/2' }, words), null);
  for (const claim of [null, 3, [], { engine: 'x', model: { quantisation: [1], sha256: {} }, sampling: { stop: '<img src=x>' } }]) {
    assert.ok(read({ schema: 'power-lab.receipt/1', claim, observed: 7 }, words));
  }
});

test('a receipt has the longest group last, and figures as people read them', () => {
  const claim = { model: { name: 'm', quantisation: { Q8_0: 30081024, odd: 'x' } }, sampling: { top_k: 0 }, output: { tokens: 71 } };
  const { groups } = read({ schema: 'power-lab.receipt/1', claim, digests: { claim: 'a' } }, words);
  assert.deepEqual(groups.map(group => group.title), ['Model', 'Figures', 'Digests (SHA-256)', 'Settings']);
  const weights = groups[0].facts.find(fact => fact.name === 'weights').value;
  assert.equal(weights, `Q8_0 × ${(30081024).toLocaleString()}, odd × x`);
});

test('a notebook is shown by its name, without its folders', () => {
  assert.equal(baseName('/home/ada/work/notebooks/tour.ipynb'), 'tour.ipynb');
  assert.equal(baseName('C:\\work\\tour.ipynb'), 'tour.ipynb');
  assert.equal(baseName('python script.py'), 'python script.py');
  assert.equal(baseName('/'), '/');
  assert.equal(clientName('/home/ada/tour.ipynb (pid 4711)'), 'tour.ipynb');
  assert.equal(clientName('notes (pid x).ipynb'), 'notes (pid x).ipynb');
});
