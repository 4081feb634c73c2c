"""The script of pages with timelines: zoom and pan, and the tensor under the pointer.

It needs what memopt/show/timeline.py writes: an element "plot" with the data, a drawing of the
areas whose x is the number of an operator, and marks that say in "data-at" at which operator they
are.
"""

SCRIPT = r"""
const HEIGHT = 1000;
const size = n => n < 5e4 ? n.toLocaleString("en-US") + " B" :
  (n / 1e6).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) + " MB";

function timeline(plot) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const frame = plot.querySelector(".frame"), areas = plot.querySelector(".areas");
  const under = areas.querySelector(".under"), tip = plot.querySelector(".tip");
  const at = document.getElementById(data.at), points = data.points, last = data.instants - 1;
  let from = 0, to = last, shown = null, held = null;

  const totals = points.map(point => point.slice(1).reduce((a, b) => a + b, 0));
  const phase = instant => data.phases.filter(p => p[1] <= instant).pop()[0];

  function place() {
    areas.setAttribute("viewBox", `${from} 0 ${to - from} ${HEIGHT}`);
    plot.querySelectorAll("[data-at]").forEach(mark => {
      const x = (mark.dataset.at - from) / (to - from) * 100;
      mark.style.display = x < -1e-6 || x > 100 ? "none" : "";
      for (const name of ["x", "x1", "x2"])
        if (mark.hasAttribute(name)) mark.setAttribute(name, x + "%");
      if (mark.classList.contains("peak"))
        mark.setAttribute("text-anchor", x > 50 ? "end" : "start");
    });
    let free = -Infinity;
    const right = frame.getBoundingClientRect().right;
    plot.querySelectorAll("text.phase").forEach(label => {
      label.style.visibility = "";
      if (label.style.display) return;
      const box = label.getBoundingClientRect();
      if (box.left < free || box.right > right + 1) label.style.visibility = "hidden";
      else free = box.right + 6;
    });
    plot.querySelector("[data-do=all]").disabled = from <= 0 && to >= last;
  }

  function show(begin, end) {
    const span = Math.min(last, Math.max(end - begin, Math.min(4, last)));
    from = Math.min(Math.max(0, begin), last - span);
    to = from + span;
    place();
  }

  function zoom(factor, center = (from + to) / 2) {
    show(center - (center - from) * factor, center + (to - center) * factor);
  }

  const pan = share => show(from + share * (to - from), to + share * (to - from));

  function indexOf(instant) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (points[middle][0] <= instant) low = middle; else high = middle - 1;
    }
    return low;
  }

  const alive = (index, category) => data.lives.filter(life =>
    life.category === category && life.first <= points[index][0] && points[index][0] <= life.last);

  // The category, and the tensor in it, that are so many bytes above the axis.
  function found(index, nbytes) {
    let base = 0;
    for (let category = 0; category < data.categories.length; category++) {
      const here = points[index][category + 1];
      if (nbytes < base + here) {
        for (const life of alive(index, category)) {
          if (nbytes < base + life.nbytes) return { category, life };
          base += life.nbytes;
        }
        return { category };
      }
      base += here;
    }
    return {};
  }

  // The band of a tensor over its life, as high as what lies below it is at each time.
  function band(life) {
    const y = nbytes => HEIGHT * (1 - nbytes / data.highest);
    let upper = "", lower = "";
    const begin = Math.max(0, indexOf(life.first)), end = indexOf(life.last);
    for (let index = begin; index <= end; index++) {
      if (points[index][0] < life.first) continue;
      let base = 0;
      for (let below = 0; below < life.category; below++) base += points[index][below + 1];
      for (const other of alive(index, life.category)) {
        if (other === life) break;
        base += other.nbytes;
      }
      const right = index + 1 < points.length ? points[index + 1][0] : last;
      upper += `L${points[index][0]} ${y(base + life.nbytes)}H${right}`;
      lower = `L${right} ${y(base)}H${points[index][0]}` + lower;
    }
    return upper && "M" + (upper + lower).slice(1) + "Z";
  }

  function line(tag, text) {
    const element = document.createElement(tag);
    element.textContent = text;
    tip.append(element);
  }

  const described = life => [size(life.nbytes), life.shape.join("x") + " " + life.dtype,
    data.categories[life.category]].join(", ");

  function say(index) {
    const [instant, ...nbytes] = points[index], mb = n => (n / 1e6).toFixed(1);
    at.textContent = `operator ${instant}: ${mb(totals[index])} MB = ` +
      data.categories.map((name, i) => `${name} ${mb(nbytes[i])}`).join(" + ");
  }

  function point(event) {
    const box = frame.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
    if (x < 0 || x > 1) return leave();
    const index = indexOf(from + x * (to - from));
    const { category, life } = found(index, data.highest * (1 - y));
    tip.replaceChildren();
    if (life) {
      line("b", life.name);
      line("div", described(life));
      if (life.module) line("div", life.module);
      if (life.line) line("div", life.line);
    } else if (category !== undefined) line("b", "smaller tensors: " + data.categories[category]);
    const instant = points[index][0];
    line("div", `operator ${instant}, ${data.operators[index]}, ${phase(instant)}: ` +
      `${size(totals[index])} in all`);
    if (category !== undefined) {
      const others = alive(index, category).filter(other => other !== life)
        .sort((a, b) => b.nbytes - a.nbytes).slice(0, 4);
      if (others.length) line("i", "Beside it:");
      others.forEach(other => line("div", `${size(other.nbytes)} ${other.name} ${other.module}`));
    }
    tip.hidden = false;
    const room = document.documentElement.clientWidth, wide = tip.offsetWidth;
    const left = Math.min(Math.max(8, event.clientX + 14), room - wide - 8);
    tip.style.left = left - box.left + "px";
    tip.style.top = (y > .5 ? y * box.height - tip.offsetHeight - 14 : y * box.height + 18) + "px";
    const cursor = plot.querySelector(".cursor");
    cursor.setAttribute("x1", x * 100 + "%"); cursor.setAttribute("x2", x * 100 + "%");
    cursor.setAttribute("opacity", 1);
    if (life !== shown) under.setAttribute("d", life ? band(life) : "");
    shown = life;
    say(index);
  }

  function leave() {
    tip.hidden = true;
    under.setAttribute("d", ""); shown = null;
    plot.querySelector(".cursor").setAttribute("opacity", 0);
    say(data.peak);
  }

  frame.addEventListener("pointermove", event => {
    if (held !== null) {
      pan((held - event.clientX) / frame.clientWidth);
      held = event.clientX;
    }
    point(event);
  });
  frame.addEventListener("pointerdown", event => {
    if (event.pointerType === "mouse") held = event.clientX;
    point(event);
  });
  window.addEventListener("pointerup", () => { held = null; });
  frame.addEventListener("pointerleave", leave);
  frame.addEventListener("dblclick", event => {
    const box = frame.getBoundingClientRect();
    zoom(.5, from + (event.clientX - box.left) / box.width * (to - from));
  });
  frame.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const box = frame.getBoundingClientRect();
    const turned = event.deltaY || event.deltaX;
    zoom(Math.exp(turned / 300), from + (event.clientX - box.left) / box.width * (to - from));
  }, { passive: false });
  const acts = { in: () => zoom(.5), out: () => zoom(2), left: () => pan(-.25),
    right: () => pan(.25), all: () => show(0, last) };
  plot.querySelectorAll("[data-do]").forEach(button =>
    button.addEventListener("click", acts[button.dataset.do]));
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right",
    "0": "all", Escape: "all" };
  frame.addEventListener("keydown", event => {
    const act = event.ctrlKey || event.metaKey ? undefined : keys[event.key];
    if (act) { event.preventDefault(); acts[act](); }
  });
  window.addEventListener("resize", place);
  place();
  say(data.peak);
}

document.querySelectorAll(".plot").forEach(timeline);
document.body.dataset.ready = "yes";
"""
