"""The page in a real browser, where there is one (Debian's `chromium`; CI installs none). The page's data is
tested without."""

import json
import re
import shutil
import subprocess

import pytest

from asyncrl_cli.report.write import write_report
from tests.report.recorded_run import line, make_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TELL = """<script>
const told = new MutationObserver(() => {
  if (!document.documentElement.dataset.drawn) return;
  told.disconnect();
  const plots = [...document.querySelectorAll(".plot")];
  const lines = (div) => div.data.filter((one) => one.mode !== "markers");
  const figures = (one) => [one.name, Array.from(one.x), Array.from(one.y)];
  const data = plots.map((div) => [div.dataset.title, lines(div).map(figures)]);
  const shown = document.createElement("pre");
  shown.id = "told";
  shown.textContent = JSON.stringify(data);
  document.body.append(shown);
});
told.observe(document.documentElement, { attributes: true });
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
def test_a_browser_draws_every_chart_from_the_data_and_finds_no_fault(tmp_path):
    pytest.importorskip("plotly")
    made, _ = write_report(
        [str(make_run(tmp_path / "otter"))], tmp_path / "page.html", tmp_path, lambda text: None
    )
    made.write_text(made.read_text().replace("</body>", TELL))
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path}/chromium",
    ]
    command = [CHROMIUM, *flags, "--virtual-time-budget=120000", "--dump-dom", made.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    plots = {title: {name: (x, y) for name, x, y in traces} for title, traces in json.loads(found[1])}
    lines = [line(step) for step in range(1, 7)]
    steps = [one["step"] for one in lines]
    assert plots["Reward"]["train"] == (steps, pytest.approx([one["reward/mean"] for one in lines]))
    assert plots["Reward"]["eval"] == ([2, 6], [0.25, 0.5])
    assert plots["Step time by part"]["wait_data"] == (steps, [6] * 6)
    assert plots["Trainer: where its time goes"]["starved"] == (steps, pytest.approx([0.6] * 6))
