import { LabIcon } from '@jupyterlab/ui-components';

// The logo of the kernelspec (power_lab/jupyter/kernelspec/logo-svg.svg): the launcher shows both, and they must agree. One colour and
// no gradient: the page holds several copies, a gradient is found by its id, and the first one with that id may be in something hidden.
import logo from '../style/logo.svg';
import mark from '../style/mark.svg';

export const logoIcon = new LabIcon({ name: 'power-lab:logo', svgstr: logo });
/** The flask alone, in the theme's icon colour. */
export const markIcon = new LabIcon({ name: 'power-lab:mark', svgstr: mark });
