"""The third opinion: naive loops over stacked NumPy arrays, in place; copies move integers, sums are in `number`."""

import numpy as np


def bits(array):
    return array.view({2: np.uint16, 4: np.uint32}[array.itemsize])


def by_column(array, spec):
    return bits(array if spec.axis_order == "time_major" else array.swapaxes(-1, -2))


def window(n, spec):  # where the state after n tokens lies in a row of the buffer
    return slice(n - 1, n - 1 + spec.state_len) if spec.storage == "sliding" else n - 1


def convolve(columns, tokens, weight, bias, spec, activation, number):
    for t in range(tokens):  # token t meets the newest K columns up to its own
        total = np.zeros(spec.conv_dim, number) if bias is None else bias.astype(number)
        for tap in range(spec.width):
            column = columns[spec.state_len + t - (spec.width - 1) + tap].view(spec.dtype)
            total = total + column.astype(number) * weight[:, tap].astype(number)
        yield total / (1 + np.exp(-total)) if activation == "silu" else total


def verify(x, state, windows, weight, bias, *, spec, slots, rows, valid, null_slot, layer, activation, number):
    pool, buffer, y = by_column(state, spec), by_column(windows, spec), np.zeros(x.shape, number)
    for b, (slot, row, v) in enumerate(zip(slots.tolist(), rows.tolist(), valid.tolist(), strict=True)):
        known = 0 <= layer < spec.num_layers and 0 <= slot < spec.num_slots and 0 <= row < spec.max_requests
        if known and slot != null_slot and 1 <= v <= spec.num_draft_tokens:
            columns = [*pool[layer, slot], *bits(x[b, :v].astype(spec.dtype))]
            y[b, :v] = list(convolve(columns, v, weight, bias, spec, activation, number))
            for n in range(1, v + 1):
                buffer[layer, row, window(n, spec)] = columns[n : n + spec.state_len]
    return y


def prefill(x, state, weight, bias, *, spec, slots, lengths, continues, null_slot, layer, activation, number):
    pool, y = by_column(state, spec), np.zeros(x.shape, number)
    for b, (slot, length, carry) in enumerate(zip(slots.tolist(), lengths.tolist(), continues.tolist(), strict=True)):
        known = 0 <= layer < spec.num_layers and 0 <= slot < spec.num_slots and slot != null_slot
        if known and 1 <= length <= x.shape[1]:
            columns = [*(pool[layer, slot] * carry), *bits(x[b, :length].astype(spec.dtype))]
            y[b, :length] = list(convolve(columns, length, weight, bias, spec, activation, number))
            pool[layer, slot] = columns[-spec.state_len :]
    return y


def commit(state, windows, slots, accepted, *, spec, rows, valid, null_slot):
    for slot, n, row, v in zip(slots.tolist(), accepted.tolist(), rows.tolist(), valid.tolist(), strict=True):
        readable = 1 <= n <= v <= spec.num_draft_tokens and 0 <= row < spec.max_requests
        if readable and 0 <= slot < state.shape[1] and slot != null_slot:
            by_column(state, spec)[:, slot] = by_column(windows, spec)[:, row, window(n, spec)]


def gather(windows, accepted, *, spec, rows, valid):  # a commit into a fresh pool that has one slot per request
    pool = np.zeros((spec.num_layers, len(rows), *spec.window_shape), spec.dtype)
    commit(pool, windows, np.arange(len(rows)), accepted, spec=spec, rows=rows, valid=valid, null_slot=None)
    return pool


def commit_recurrent(state, steps, slots, accepted, *, rows, valid, null_slot):
    for slot, n, row, v in zip(slots.tolist(), accepted.tolist(), rows.tolist(), valid.tolist(), strict=True):
        readable = 1 <= n <= v <= steps.shape[2] and 0 <= row < steps.shape[1]
        if readable and 0 <= slot < state.shape[1] and slot != null_slot:
            bits(state)[:, slot] = bits(steps)[:, row, n - 1]
