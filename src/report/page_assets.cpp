// Style and script of the page.
#include "page.h"

namespace hasten::detail::run_report {

// Colours: Okabe and Ito's, which colour-blind people can distinguish; lighter ones on dark.
const std::string_view kPageStyle = R"css(
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--text:#1d2126;--dim:#66707a;--edge:#e3e5e8;--grid:#eceef0;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b5578f;--c4:#b07d00;--c5:#3f8fc4;--c6:#7a5aa6;--c7:#5f6770}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1c2024;--text:#e4e7ea;--dim:#98a2ac;--edge:#30363c;--grid:#2a2f35;
--c0:#56b4e9;--c1:#f0883e;--c2:#2fc79b;--c3:#e39ac6;--c4:#e6b422;--c5:#9ecbed;--c6:#b79ce0;--c7:#a4adb6}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1160px;padding:28px 20px 60px;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,sans-serif;font-variant-numeric:tabular-nums}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}h2{font-size:18px;margin:40px 0 12px}
p{margin:4px 0}small,.dim{color:var(--dim);font-weight:400}bdi,td,pre{overflow-wrap:break-word}.texts td:first-child{min-width:220px}
.status{font-size:13px;font-weight:600;padding:2px 10px;border-radius:20px;border:1px solid var(--edge);color:var(--dim);white-space:nowrap;vertical-align:4px}
.finished{color:var(--c2);border-color:var(--c2)}.running{color:var(--c0);border-color:var(--c0)}
.note{border-left:3px solid var(--c1);padding:2px 12px;margin:10px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(134px,1fr));gap:12px;margin:22px 0}
.tiles div,figure,.box{background:var(--card);border:1px solid var(--edge);border-radius:10px;padding:12px 14px}
.tiles b{display:block;font-size:23px;line-height:1.3;font-weight:600}.tiles small{display:block;font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(max(min(100%,330px),34%),1fr));gap:14px}
figure{margin:0;position:relative;break-inside:avoid;outline-offset:2px}
figcaption{font-weight:600;margin-bottom:2px}figcaption bdi{font-size:13px;margin-left:8px}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}svg text{font-size:10.5px;fill:var(--dim)}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg path{fill:none;stroke-width:1}.grid{stroke:var(--grid)}.axis{stroke:var(--dim)}.epoch{stroke:var(--grid);stroke-dasharray:2 3}.cross{stroke:var(--c7);stroke-dasharray:4 3}
.line{stroke-width:1.8;stroke-linejoin:round}.raw{stroke-width:1;opacity:.3}
.s0{stroke:var(--c0)}.s1{stroke:var(--c1)}.s2{stroke:var(--c2)}.s3{stroke:var(--c3)}.s4{stroke:var(--c4)}.s5{stroke:var(--c5)}.s6{stroke:var(--c6)}.s7{stroke:var(--c7)}
svg .f0,.f0{fill:var(--c0);color:var(--c0)}svg .f1,.f1{fill:var(--c1);color:var(--c1)}svg .f2,.f2{fill:var(--c2);color:var(--c2)}svg .f3,.f3{fill:var(--c3);color:var(--c3)}
svg .f4,.f4{fill:var(--c4);color:var(--c4)}svg .f5,.f5{fill:var(--c5);color:var(--c5)}svg .f6,.f6{fill:var(--c6);color:var(--c6)}svg .f7,.f7{fill:var(--c7);color:var(--c7)}
.tip{position:absolute;top:34px;pointer-events:none;background:var(--card);border:1px solid var(--edge);border-radius:7px;padding:5px 9px;font-size:13px;line-height:1.45;box-shadow:0 3px 12px #0002;white-space:nowrap;z-index:1}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px}th,td{padding:4px 16px 4px 0;text-align:right;border-bottom:1px solid var(--edge);vertical-align:top}
th:first-child,td:first-child,.facts th,.facts td,.texts td:nth-child(-n+3),.texts th:nth-child(-n+3){text-align:left}th{color:var(--dim);font-weight:500}
.matrix td+td{padding:6px 12px;text-align:center;border:2px solid var(--card);border-radius:6px;min-width:64px}.matrix th+th{text-align:center;padding:4px 12px}
pre{margin:0;padding:12px 14px;background:var(--card);border:1px solid var(--edge);border-radius:10px;font:13px/1.6 ui-monospace,monospace;white-space:pre-wrap}
summary{cursor:pointer;color:var(--dim);margin:12px 0}
@media(max-width:900px){svg text{font-size:13px}}
@media(max-width:560px){body{padding:18px 12px 40px}.tiles{grid-template-columns:1fr 1fr}.tiles b{font-size:20px}th,td{padding-right:12px}}
@media print{:root{--bg:#fff}body{max-width:none;padding:0;font-size:12px}.charts{grid-template-columns:1fr 1fr}figure,.tiles div,tr{break-inside:avoid}.tip,.cross{display:none}}
)css";

// Shows the values nearest to the pointer, or moves through the points by the arrow keys.
const std::string_view kPageScript = R"js(
const charts = JSON.parse(document.getElementById('data').textContent);
const number = (v, unit) => {
  if (unit === 'b') { let i = 0; while (Math.abs(v) >= 1024 && i < 5) { v /= 1024; i++; }
    return v.toLocaleString('en-US', {maximumFractionDigits: 1}) + ' ' + ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'][i]; }
  const small = v !== 0 && Math.abs(v) < 1e-4;
  return (small ? v.toPrecision(4) : v.toLocaleString('en-US', {maximumSignificantDigits: 6})) + (unit ? ' ' + unit : '');
};
const nearest = (xs, x) => {
  let a = 0, b = xs.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] <= x) a = m; else b = m; }
  return x - xs[a] <= xs[b] - x ? a : b;
};
for (const figure of document.querySelectorAll('figure[data-chart]')) {
  const c = charts[figure.dataset.chart], svg = figure.querySelector('svg'), [left, right, last] = c.x;
  const make = (name, attributes) => { const e = document.createElementNS(svg.namespaceURI, name);
    for (const k in attributes) e.setAttribute(k, attributes[k]); return svg.appendChild(e); };
  let marks = [], tip = null, at = 0;
  const hide = () => { marks.forEach(m => m.remove()); marks = []; if (tip) tip.remove(); tip = null; };
  const show = step => {
    hide();
    const main = c.s.reduce((best, s) => {
      const i = nearest(s.x, step); return !best || Math.abs(s.x[i] - step) < Math.abs(best - step) ? s.x[i] : best; }, null);
    at = main;
    const px = left + (right - left) * main / last;
    marks.push(make('path', {d: `M${px} ${c.y[1]}V${c.y[0]}`, class: 'cross'}));
    tip = figure.appendChild(document.createElement('div')); tip.className = 'tip';
    tip.appendChild(document.createElement('div')).textContent =
      'step ' + main.toLocaleString('en-US') + (c.e ? ', epoch ' + (main / c.e).toFixed(2) : '');
    for (const s of c.s) {
      const i = nearest(s.x, main), v = s.y[i], [low, high, log] = c.v;
      const py = c.y[0] - (c.y[0] - c.y[1]) * ((log ? Math.log10(v) : v) - low) / (high - low);
      marks.push(make('circle', {cx: left + (right - left) * s.x[i] / last, cy: py, r: 3.4, class: 'f' + s.c}));
      const line = tip.appendChild(document.createElement('div')), name = line.appendChild(document.createElement('bdi'));
      name.className = 'f' + s.c; name.textContent = s.n ? s.n + ' ' : '';
      line.append(number(v, c.u) + (s.x[i] !== main ? ' (step ' + s.x[i].toLocaleString('en-US') + ')' : ''));
    }
    const box = svg.getBoundingClientRect(), x = px / svg.viewBox.baseVal.width * box.width + box.left - figure.getBoundingClientRect().left;
    const room = figure.clientWidth - tip.offsetWidth - 6;
    tip.style.left = Math.max(6, Math.min(x + 14 > room ? x - tip.offsetWidth - 14 : x + 14, room)) + 'px';
  };
  svg.addEventListener('pointermove', e => { const box = svg.getBoundingClientRect();
    show(((e.clientX - box.left) / box.width * svg.viewBox.baseVal.width - left) / (right - left) * last); });
  svg.addEventListener('pointerleave', hide); figure.addEventListener('blur', hide);
  figure.addEventListener('keydown', e => { const by = {ArrowLeft: -1, ArrowRight: 1}[e.key], xs = c.s[0].x;
    if (by) { e.preventDefault(); show(xs[Math.max(0, Math.min(xs.length - 1, nearest(xs, at) + (tip ? by : 0)))]); } });
}
)js";

} // namespace hasten::detail::run_report
