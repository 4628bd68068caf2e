import { LabIcon } from '@jupyterlab/ui-components';

// The logo of the kernelspec (power_lab/jupyter/kernelspec/logo-svg.svg): the launcher shows both, and they must agree.
import logo from '../style/logo.svg';
import mark from '../style/mark.svg';

export const logoIcon = new LabIcon({ name: 'power-lab:logo', svgstr: logo });
/** The flask alone, in the theme's icon colour. */
export const markIcon = new LabIcon({ name: 'power-lab:mark', svgstr: mark });
