import assert from 'node:assert/strict';
import { test } from 'node:test';

import { Feed } from '../lib/feed.js';

const VITALS = JSON.stringify({ kind: 'vitals', at: 1, engines: [] });

/** A feed on hand-cranked time and sockets. */
function made() {
  const world = { now: 0, timers: new Map(), sockets: [], heard: [], links: [] };
  let ids = 0;
  const timers = {
    now: () => world.now,
    after: (ms, call) => (world.timers.set(++ids, { at: world.now + ms, call }), ids),
    cancel: id => world.timers.delete(id)
  };
  world.pass = ms => {
    const end = world.now + ms;
    for (;;) {
      const next = [...world.timers].filter(([, timer]) => timer.at <= end).sort((a, b) => a[1].at - b[1].at)[0];
      if (!next) break;
      world.timers.delete(next[0]);
      world.now = next[1].at;
      next[1].call();
    }
    world.now = end;
  };
  const connect = () => {
    const socket = { sent: [], closed: false, send: text => socket.sent.push(JSON.parse(text)), close: () => (socket.closed = true) };
    world.sockets.push(socket);
    return socket;
  };
  world.feed = new Feed(connect, timers, message => world.heard.push(message), link => world.links.push(link));
  world.live = () => {
    const socket = world.sockets.at(-1);
    socket.onopen();
    socket.onmessage({ data: VITALS });
    return socket;
  };
  return world;
}

test('nothing is opened before something is shown', () => {
  const world = made();
  world.pass(60_000);
  assert.equal(world.sockets.length, 0);
  world.feed.setRate(2);
  assert.deepEqual(world.live().sent, [{ kind: 'rate', hz: 2 }]);
  assert.equal(world.feed.link, 'live');
});

test('silence of two seconds is a lost connection, and a new one is made', () => {
  const world = made();
  world.feed.setRate(4);
  const first = world.live();
  world.pass(1700);
  assert.equal(world.feed.link, 'live');
  world.pass(300);
  assert.equal(world.feed.link, 'disconnected');
  assert.ok(first.closed);
  world.pass(300);
  assert.equal(world.sockets.length, 2);
  world.live();
  assert.equal(world.feed.link, 'live');
});

test('a paused feed is silent and stays connected', () => {
  const world = made();
  world.feed.setRate(4);
  const socket = world.live();
  world.feed.setRate(0);
  world.pass(60_000);
  assert.equal(world.feed.link, 'paused');
  assert.equal(world.sockets.length, 1);
  world.feed.setRate(4);
  assert.deepEqual(socket.sent.map(message => message.hz), [4, 0, 4]);
  world.pass(1000);
  assert.notEqual(world.feed.link, 'disconnected', 'the time of the pause counted as silence');
});

test('pauses between attempts double up to eight seconds, and what never answered is unavailable', () => {
  const world = made();
  const at = [];
  world.feed.setRate(1);
  for (let attempt = 0; attempt < 9; attempt += 1) {
    at.push(world.now);
    const before = world.sockets.length;
    world.sockets.at(-1).onclose({});
    while (world.sockets.length === before) world.pass(10);
  }
  const gaps = at.slice(1).map((time, index) => time - at[index]);
  assert.deepEqual(gaps, [250, 500, 1000, 2000, 4000, 8000, 8000, 8000]);
  assert.equal(world.feed.link, 'unavailable');
  world.live();
  assert.equal(world.feed.link, 'live');
  world.sockets.at(-1).onclose({});
  assert.equal(world.feed.link, 'disconnected', 'it has answered before');
});

test('requests are answered by number, and fail with the connection', async () => {
  const world = made();
  await assert.rejects(world.feed.request('stop', 'a'));
  world.feed.setRate(1);
  const socket = world.live();
  const [one, two, three] = ['stop', 'unload', 'restart'].map(kind => world.feed.request(kind, 'key'));
  const [, a, b] = socket.sent;
  assert.deepEqual([a.kind, a.engine, b.kind], ['stop', 'key', 'unload']);
  socket.onmessage({ data: JSON.stringify({ kind: 'failed', id: b.id, message: 'in use', remedy: 'wait' }) });
  socket.onmessage({ data: JSON.stringify({ kind: 'done', id: a.id }) });
  await one;
  await assert.rejects(two, error => error.message === 'in use' && error.remedy === 'wait');
  socket.onclose({});
  await assert.rejects(three);
});

test('nonsense is passed over', () => {
  const world = made();
  world.feed.setRate(1);
  const socket = world.live();
  for (const data of ['{', 'null', '[]', '{"kind":"news"}', '{"kind":"vitals"}', new ArrayBuffer(1)]) socket.onmessage({ data });
  assert.equal(world.heard.length, 1);
  assert.equal(world.feed.link, 'live');
  socket.onmessage({ data: '{"kind":"error","message":"m","remedy":"r"}' });
  assert.equal(world.feed.link, 'trouble');
});
