/** What the server sends: the engine host's vitals as JSON (power_lab/engine/vitals.py), and answers. Pure. */

export interface IRun {
  run: number | string;
  client: string;
  tokens: number;
  prompt_tokens: number;
  drafted: number;
  accepted: number;
  age_s: number;
}

export interface IEngine {
  /** Its key: names it in requests. */
  engine: string;
  model: string;
  device: string;
  mode: string;
  state: 'loading' | 'ready';
  stage: string;
  clients: string[];
  running: number;
  waiting: number;
  rows: number;
  steps: number;
  requests: number;
  tokens: number;
  prompt_tokens: number;
  cached_tokens: number;
  drafted: number;
  accepted: number;
  passes: number;
  tokens_per_s: number;
  prompt_tokens_per_s: number;
  acceptance: number | null;
  tokens_per_pass: number | null;
  hit_rate: number | null;
  free_blocks: number;
  cached_blocks: number;
  used_blocks: number;
  weights_bytes: number;
  pool_bytes: number;
  graph_bytes: number;
  workspace_bytes: number;
  captures: number;
  replays: number;
  eager: number;
  drafter: string;
  last_step_s: number | null;
  ends_in_s: number | null;
  runs: IRun[];
}

export interface IDevice {
  name: string;
  memory_used: number | null;
  memory_total: number | null;
  utilisation: number | null;
  temperature_c: number | null;
  power_w: number | null;
}

export interface IVitals {
  kind: 'vitals';
  /** Unix seconds. */
  at: number;
  seq: number;
  pid: number;
  package: string;
  revision: string;
  uptime_s: number;
  clients: string[];
  ends_in_s: number | null;
  engines: IEngine[];
  device: IDevice;
}

export type Message =
  | IVitals
  | { kind: 'nohost'; at: number }
  | { kind: 'error'; message: string; remedy: string }
  | { kind: 'done'; id: number }
  | { kind: 'failed'; id: number; message: string; remedy: string };

export type Action = 'stop' | 'unload' | 'restart';

/** A message of the server; null where it is none that this page knows (a newer server may say more). */
export function parse(text: unknown): Message | null {
  if (typeof text !== 'string') {
    return null;
  }
  let data: any;
  try {
    data = JSON.parse(text);
  } catch {
    return null;
  }
  switch (data?.kind) {
    case 'vitals':
      return Array.isArray(data.engines) && typeof data.at === 'number' ? { ...data, device: data.device ?? NO_DEVICE } : null;
    case 'nohost':
      return { kind: 'nohost', at: Number(data.at ?? 0) };
    case 'error':
      return { kind: 'error', message: String(data.message ?? ''), remedy: String(data.remedy ?? '') };
    case 'done':
      return { kind: 'done', id: Number(data.id) };
    case 'failed':
      return { kind: 'failed', id: Number(data.id), message: String(data.message ?? ''), remedy: String(data.remedy ?? '') };
    default:
      return null;
  }
}

const NO_DEVICE: IDevice = {
  name: '',
  memory_used: null,
  memory_total: null,
  utilisation: null,
  temperature_c: null,
  power_w: null
};
