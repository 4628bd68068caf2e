/** The commands, in one place. */
export const Command = {
  openPanel: 'power-lab:open-panel',
  stop: 'power-lab:stop',
  stopAll: 'power-lab:stop-all',
  unload: 'power-lab:unload',
  restart: 'power-lab:restart',
  newNotebook: 'power-lab:new-notebook',
  openTour: 'power-lab:open-tour',
  layout: 'power-lab:layout'
} as const;

/** The kernel's name in its kernelspec. */
export const KERNEL = 'power_lab';
