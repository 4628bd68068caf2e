import { LabIcon } from '@jupyterlab/ui-components';

import beside from '../style/beside.svg';
// The logo of the kernelspec (power_lab/jupyter/kernelspec/logo-svg.svg): the launcher shows both, and they must agree. One colour and
// no gradient: the page holds several copies, a gradient is found by its id, and the first one with that id may be in something hidden.
import logo from '../style/logo.svg';
import mark from '../style/mark.svg';
import tour from '../style/tour.svg';

export const logoIcon = new LabIcon({ name: 'power-lab:logo', svgstr: logo });
/** The other cards of the launcher, so that they are told apart before they are read. */
export const tourIcon = new LabIcon({ name: 'power-lab:tour', svgstr: tour });
export const besideIcon = new LabIcon({ name: 'power-lab:beside', svgstr: beside });
/** The flask alone, in the theme's icon colour. */
export const markIcon = new LabIcon({ name: 'power-lab:mark', svgstr: mark });
