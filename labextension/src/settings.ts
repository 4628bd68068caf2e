import type { ISettingRegistry } from '@jupyterlab/settingregistry';
import type { TranslationBundle } from '@jupyterlab/translation';

/**
 * Read a plugin's settings, now and whenever they change. Its schema has `jupyter.lab.transform`: JupyterLab waits for the one made here.
 *
 * The server translates a prebuilt extension's schema only where it is asked for by itself (jupyterlab_server 2.28, `_list_settings`), and
 * the settings editor shows the list of all: so it is translated here.
 */
export async function follow(
  registry: ISettingRegistry,
  id: string,
  trans: TranslationBundle,
  read: (settings: ISettingRegistry.ISettings) => void
): Promise<void> {
  registry.transform(id, { fetch: plugin => ({ ...plugin, schema: translated(plugin.schema, trans) }) });
  const settings = await registry.load(id);
  read(settings);
  settings.changed.connect(read);
}

/** With titles and descriptions in the page's language, in the contexts that the server has for them. */
function translated(schema: ISettingRegistry.ISchema, trans: TranslationBundle): ISettingRegistry.ISchema {
  const properties = Object.entries(schema.properties ?? {}).map(([name, one]) => [name, worded(one, 'settings', trans)]);
  return { ...worded(schema, 'schema', trans), properties: Object.fromEntries(properties) };
}

function worded<T extends { title?: string; description?: string }>(holder: T, context: string, trans: TranslationBundle): T {
  const told = { ...holder };
  for (const key of ['title', 'description'] as const) {
    const words = holder[key];
    if (words) {
      told[key] = trans._p(context, words);
    }
  }
  return told;
}
