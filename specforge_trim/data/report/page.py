"""The look of the HTML data report: one style sheet, light and dark, with the system's fonts."""

STYLE = """
:root{--ink:#1c2330;--soft:#5d6778;--line:#dfe3ea;--page:#f6f7f9;--box:#fff;--blue:#2f6fde;
--red:#d1382c;--loss:#b9ecc6;--loss-ink:#0b4a1f}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#333b48;--page:#14181f;
--box:#1c222c;--blue:#6c9df5;--red:#ff7a6e;--loss:#1d5b33;--loss-ink:#d8fbe3}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1040px;margin:0 auto;padding:24px 20px 60px}
h1{font-size:26px;margin:0 0 4px}h2{font-size:18px;margin:30px 0 10px}
h3{font-size:15px;margin:0}h3 small{font-weight:400;color:var(--soft);margin-left:10px}
.sub{color:var(--soft);margin:2px 0 10px;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(145px,1fr));gap:10px}
.card{background:var(--box);border:1px solid var(--line);border-radius:8px;padding:10px 14px}
.card b{display:block;font-size:21px}.card small{display:block;color:var(--soft)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:12px}
figure{margin:0;background:var(--box);border:1px solid var(--line);border-radius:8px;
padding:10px 12px}
figcaption{font-weight:600;font-size:14px;margin-bottom:4px}
svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}
.bar{fill:var(--blue)}.value,.tick,.axis{text-anchor:middle}.y-tick,.level-name{text-anchor:end}
svg .value{fill:var(--ink)}.grid{stroke:var(--line)}
.level{stroke:var(--red);stroke-dasharray:5 4}svg .level-name{fill:var(--red)}
.point{fill:var(--blue);fill-opacity:.55}.point.refused{fill:var(--red)}
table{border-collapse:collapse;background:var(--box);border:1px solid var(--line);width:100%;
font-variant-numeric:tabular-nums}
th,td{padding:5px 12px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;
overflow-wrap:anywhere}
th{white-space:nowrap;color:var(--soft);font-weight:600;font-size:13px}
article{background:var(--box);border:1px solid var(--line);border-radius:8px;padding:12px 16px;
margin:12px 0}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.75 ui-monospace,monospace;
max-height:1200px;overflow:auto;border-top:1px solid var(--line);padding-top:8px}
.t{border-radius:3px;box-shadow:inset -1px 0 0 var(--line)}
.gap{display:block;margin:6px 0;padding:2px 10px;color:var(--soft);
border-left:3px solid var(--line);font-family:system-ui,sans-serif}
#paint-mask:checked~article .loss,.legend .loss{background:var(--loss);color:var(--loss-ink)}
#paint-rows:checked~article [class*=" k"],.legend [class*=" k"]{background:var(--row);
color:#101828}
.legend .t{padding:1px 6px}.legend{margin:8px 0}
#paint-mask:checked~.rows,#paint-rows:checked~.mask{display:none}
label{margin:0 18px 0 4px;cursor:pointer}
"""
