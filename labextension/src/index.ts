import { clientPlugin } from './client.js';
import { commandsPlugin } from './commands.js';
import { launcherPlugin } from './launcher.js';
import { layoutPlugin } from './layout.js';
import { panelPlugin } from './panel.js';
import { receiptPlugin } from './receipt.js';
import { statusPlugin } from './status.js';

export { IPowerClient } from './tokens.js';

/** One plugin for each thing, so that each can be turned off by itself. */
export default [clientPlugin, panelPlugin, statusPlugin, commandsPlugin, layoutPlugin, launcherPlugin, receiptPlugin];
