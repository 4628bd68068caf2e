import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { TranslationBundle } from '@jupyterlab/translation';
import { MenuBar } from '@lumino/widgets';

const MENU = 'jp-mainmenu-power-lab'; // as in schema/commands.json

/**
 * The title of our menu in the page's language. The server translates a prebuilt extension's schema only where it is asked for by itself
 * (jupyterlab_server 2.28, `_list_settings`), and JupyterLab makes menus from the list of all.
 */
export async function translateMenu(app: JupyterFrontEnd, trans: TranslationBundle): Promise<void> {
  await app.restored; // menus are there
  for (const bar of app.shell.widgets('menu')) {
    const menu = bar instanceof MenuBar ? bar.menus.find(one => one.id === MENU) : undefined;
    if (menu) {
      menu.title.label = trans._p('menu', 'Power Lab');
    }
  }
}
