import assert from 'node:assert/strict';
import { test } from 'node:test';

import { begin, firstSteps } from '../lib/starter.js';

const words = { __: text => text };

function notebook(...sources) {
  const cells = sources.map(source => ({ source }));
  return { context: { ready: Promise.resolve(), model: { sharedModel: { cells, insertCells: (at, more) => cells.splice(at, 0, ...more) } } } };
}
const sources = made => made.context.model.sharedModel.cells.map(cell => cell.source);

test('a new notebook begins with the first steps, and an empty cell below them', async () => {
  const made = notebook('');
  await begin(made, words);
  assert.deepEqual(sources(made), [...firstSteps(words), '']);
  const all = sources(made).join('\n');
  for (const name of ['lab.load', 'lab.generate', 'lab.watch', 'lab.inspect']) assert.ok(all.includes(name), name);
});

test('a notebook with text in it is left alone, and so is what is none', async () => {
  const made = notebook('', 'x = 1');
  await begin(made, words);
  assert.deepEqual(sources(made), ['', 'x = 1']);
  for (const none of [undefined, null, {}]) await begin(none, words);
});

test('words of other languages cannot end a comment', () => {
  for (const step of firstSteps({ __: () => 'un\ndeux' })) assert.ok(!step.includes('\n'), step);
});
