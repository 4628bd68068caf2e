// Bundle lib/ into ../power_lab/labextension. Nothing is fetched: what JupyterLab shares is read from node_modules.
import { spawnSync } from 'node:child_process';
import { createRequire } from 'node:module';
import { dirname, join } from 'node:path';
import { fileURLToPath } from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const find = createRequire(import.meta.url).resolve;
const builder = join(dirname(find('@jupyter/builder/package.json')), 'lib', 'build-labextension.js');
const core = find('@jupyterlab/core-meta/core.package.json');
const options = ['--core-package-file', core, ...process.argv.slice(2)];
process.exitCode = spawnSync(process.execPath, [builder, ...options, here], { stdio: 'inherit', cwd: here }).status ?? 1;
