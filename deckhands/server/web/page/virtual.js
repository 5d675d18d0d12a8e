// A list of any length of which only the rows in sight exist. It stays where the reader scrolled, and at its end while
// the reader is there: by intent, because rows grow after they have been scrolled to.

import { html, useEffect, useLayoutEffect, useReducer, useRef } from "./ui.js";
import { elementScroll, observeElementOffset, observeElementRect, Virtualizer } from "./vendored/virtual-core.js";

const NEAR_PX = 60, EXTRA_ROWS = 4;

/**
 * Show rows. `handle` is an object that gets `show(index)`, `end()` and `isAtEnd`.
 * `keyOf(index)` names a row, `row(index)` returns it. `isTailed` starts at the end and follows it.
 */
export function List({ count, keyOf, row, estimate, handle, isTailed = false, onTail, ...attributes }) {
  const scroller = useRef(null), list = useRef(null), seen = useRef({ top: 0, isAtEnd: isTailed, isAiming: 0 });
  const [, again] = useReducer((number) => number + 1, 0);
  const options = {
    count, getItemKey: keyOf, estimateSize: () => estimate, overscan: EXTRA_ROWS, anchorTo: "end", scrollEndThreshold: 0,
    getScrollElement: () => scroller.current, observeElementRect, observeElementOffset, scrollToFn: elementScroll, onChange: again, useAnimationFrameWithResizeObserver: false,
  };
  list.current ??= new Virtualizer(options);
  const virtual = list.current;
  virtual.setOptions(options);

  const stick = () => { const node = scroller.current; if (node && seen.current.isAtEnd) { node.scrollTop = node.scrollHeight; seen.current.top = node.scrollTop; } };
  useLayoutEffect(() => virtual._didMount(), []);
  useLayoutEffect(() => { virtual._willUpdate(); stick(); });
  useEffect(() => {
    const observer = new ResizeObserver(stick);
    observer.observe(scroller.current);
    observer.observe(scroller.current.firstElementChild);
    return () => observer.disconnect();
  }, []);

  function left() {
    const node = scroller.current, { top, isAtEnd } = seen.current;
    if (!node) return;  // the browser reports a scroll in its next frame, when the list may be gone
    const isNear = node.scrollHeight - node.scrollTop - node.clientHeight < NEAR_PX;
    const is = isNear || (isAtEnd && node.scrollTop >= top - 2);
    seen.current = { top: node.scrollTop, isAtEnd: is && isTailed };
    if (seen.current.isAtEnd !== isAtEnd) onTail?.(seen.current.isAtEnd);
  }
  if (handle) {
    handle.show = (index, align = "center") => {
      if (index === count - 1 && seen.current.isAtEnd) return;
      seen.current.isAtEnd = false;
      onTail?.(false);
      virtual.scrollToIndex(index, { align });
    };
    handle.end = () => { seen.current.isAtEnd = true; onTail?.(true); stick(); };
    handle.isAtEnd = () => seen.current.isAtEnd;
    handle.first = () => virtual.range?.startIndex ?? 0;
  }
  return html`<div class="virtual" ref=${scroller} onScroll=${left} ...${attributes}>
    <div class="room" style=${{ height: `${virtual.getTotalSize()}px` }}>
      ${virtual.getVirtualItems().map((item) => html`<div class="slot" key=${item.key} data-index=${item.index} ref=${virtual.measureElement} style=${{ transform: `translateY(${item.start}px)` }}>${row(item.index)}</div>`)}
    </div></div>`;
}
