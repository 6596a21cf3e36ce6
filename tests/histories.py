"""Rows of inputs, draft trees and steps that resume, as naive loops beside `tests.definition`; in place, on integers.

`seen`, where given, is a pair of bool arrays like pool and buffer by column: the columns that a call reads.
"""

import numpy as np

from tests.definition import bits, by_column, window


def nodes_after(n, path, spec):  # the nodes whose columns the state after n tokens needs, in order
    nodes = list(range(n)) if path is None else path[:n].tolist()
    return nodes[-spec.state_len :] if spec.storage == "inputs" else nodes[-1:]


def is_state(n, path, v, spec):  # whether a row holds, or a slot and a row make, the state after n tokens
    if not 1 <= n <= spec.num_draft_tokens:
        return False
    allowed = [n - 1] if spec.storage == "sliding" else range(v)
    return all(node in allowed for node in nodes_after(n, path, spec))


def state_after(n, path, slot, row, spec):
    nodes = nodes_after(n, path, spec)
    if spec.storage == "inputs":
        return np.asarray([*slot, *(row[node] for node in nodes)][-spec.state_len :])
    return np.array(row[nodes[0]] if spec.storage == "dense" else row[window(n, spec)])


def mark(n, path, slot, row, spec):
    nodes = nodes_after(n, path, spec)
    if spec.storage == "inputs":
        row[nodes] = True
        slot[min(n, spec.state_len) :] = True
    else:
        row[nodes[0] if spec.storage == "dense" else window(n, spec)] = True


def ancestors(node, links):
    return [] if node < 0 else [*ancestors(links[node], links), node]


def links_hold(links, v, spec):
    chain = spec.storage == "sliding"
    return all(link == t - 1 if chain else -1 <= link < t for t, link in enumerate(links[:v]))


def verify(
    x, state, windows, weight, bias, *, spec, slots, rows, valid, null_slot, layer, activation, number,
    parents=None, resume=None, resume_path=None, previous=None, seen=None,
):  # fmt: skip
    pool, buffer, before = by_column(state, spec), by_column(windows, spec), by_column(windows.copy(), spec)
    old = before if previous is None else by_column(previous, spec)
    own = before[layer] if x is None else bits(x.astype(spec.dtype))
    y = np.zeros((len(slots), spec.num_draft_tokens, spec.conv_dim), number)
    chain = np.arange(-1, spec.num_draft_tokens - 1)
    live = []
    for b, (slot, row, v) in enumerate(zip(slots.tolist(), rows.tolist(), valid.tolist(), strict=True)):
        known = 0 <= layer < spec.num_layers and 0 <= slot < spec.num_slots and 0 <= row < spec.max_requests
        links = (chain if parents is None else parents[b]).tolist()
        r, path = 0 if resume is None else int(resume[b]), None if resume_path is None else resume_path[b]
        known = known and slot != null_slot and 1 <= v <= spec.num_draft_tokens and links_hold(links, v, spec)
        if not known or not (r == 0 or is_state(r, path, spec.num_draft_tokens, spec)):
            continue
        live.append(b)
        history = pool[layer, slot].copy() if r == 0 else state_after(r, path, pool[layer, slot], old[layer, row], spec)
        if seen is not None and r:
            mark(r, path, seen[0][layer, slot], seen[1][layer, row], spec)
        elif seen is not None:
            seen[0][layer, slot] = True
        inputs, states = own[row if x is None else b], []
        for t in range(v):
            columns = [*history, *(inputs[node] for node in ancestors(t, links))]
            total = np.zeros(spec.conv_dim, number) if bias is None else bias.astype(number)
            for tap, column in enumerate(columns[-spec.width :]):
                total = total + column.view(spec.dtype).astype(number) * weight[:, tap].astype(number)
            y[b, t] = total / (1 + np.exp(-total)) if activation == "silu" else total
            states.append(columns[-spec.state_len :])
        if spec.storage == "inputs":
            buffer[layer, row, :v] = inputs[:v]
            if r:
                pool[layer, slot] = history
            continue
        for n in range(1, v + 1):
            buffer[layer, row, window(n, spec)] = states[n - 1]
    return y, live


def commit(state, windows, sets, *, spec, rows, valid, null_slot, path=None, seen=None):
    pool, buffer = by_column(state, spec), by_column(windows, spec)
    before, source = pool.copy(), sets[0][0]
    for slots, counts in sets:
        for b, (slot, n, row, v) in enumerate(
            zip(slots.tolist(), counts.tolist(), rows.tolist(), valid.tolist(), strict=True)
        ):
            own, nodes = int(source[b]), None if path is None else path[b]
            readable = 1 <= n <= v <= spec.num_draft_tokens and 0 <= row < spec.max_requests
            written = [slot, own] if spec.storage == "inputs" else [slot]
            named = all(0 <= one < spec.num_slots and one != null_slot for one in written)
            if not (readable and named and is_state(n, nodes, v, spec)):
                continue
            from_slot = own if spec.storage == "inputs" else slot
            for layer in range(pool.shape[0]):
                if seen is not None:
                    mark(n, nodes, seen[0][layer, from_slot], seen[1][layer, row], spec)
                pool[layer, slot] = state_after(n, nodes, before[layer, from_slot], buffer[layer, row], spec)
