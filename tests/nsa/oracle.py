"""Native Sparse Attention in NumPy float64, by loops over tokens: it shares no code with xsake.

Everything is for one batch row. `ids` are its segment ids: a run of equal ids is a sequence, and
negative ids are padding. A mask is bool [T, K, S]: which keys query t sees in kv head κ.
"""

from __future__ import annotations

import numpy as np


def starts(ids) -> list[int]:
    """For every token the index at which its sequence begins; -1 for padding."""
    found = []
    for t, number in enumerate(ids):
        if number < 0:
            found.append(-1)
        elif t > 0 and ids[t - 1] == number:
            found.append(found[-1])
        else:
            found.append(t)
    return found


def selected_mask(indices, counts, ids, block) -> np.ndarray:
    """indices [T, K, C], counts [T, K] or None."""
    T, K, C = indices.shape
    seen = np.zeros((T, K, T), bool)
    for t, begin in enumerate(starts(ids)):
        if begin < 0:
            continue
        for kappa in range(K):
            count = C if counts is None else counts[t, kappa]
            for j in indices[t, kappa, : max(count, 0)]:
                if j < 0:
                    continue
                for s in range(begin + j * block, min(begin + (j + 1) * block, t + 1)):
                    seen[t, kappa, s] = True
    return seen


def window_mask(ids, K, size) -> np.ndarray:
    T = len(ids)
    seen = np.zeros((T, K, T), bool)
    for t, begin in enumerate(starts(ids)):
        if begin >= 0:
            seen[t, :, max(begin, t - size + 1) : t + 1] = True
    return seen


def pooled_blocks(ids, block, stride) -> list[tuple[int, int]]:
    """(first token, number within its sequence) of every block that is complete."""
    begins, T = starts(ids), len(ids)
    found = []
    for begin in sorted({b for b in begins if b >= 0}):
        length = sum(b == begin for b in begins)
        number = 0
        while number * stride + block <= length:
            found.append((begin + number * stride, number))
            number += 1
    assert all(first + block <= T for first, _ in found)
    return found


def compressed_mask(ids, K, block, stride) -> np.ndarray:
    """[T, K, P]: a query sees the blocks of its sequence that end at it or before."""
    blocks, begins = pooled_blocks(ids, block, stride), starts(ids)
    seen = np.zeros((len(ids), K, len(blocks)), bool)
    for t, begin in enumerate(begins):
        for i, (first, _) in enumerate(blocks):
            seen[t, :, i] = begin >= 0 and begins[first] == begin and first + block - 1 <= t
    return seen


def pool(x, ids, block, stride, weights=None) -> np.ndarray:
    """x [T, K, H] -> [P, K, H]: Σ_i weights[i] x[i]; by default the mean."""
    weights = np.full(block, 1 / block) if weights is None else weights
    blocks = pooled_blocks(ids, block, stride)
    out = np.zeros((len(blocks), *x.shape[1:]))
    for i, (first, _) in enumerate(blocks):
        for o in range(block):
            out[i] += weights[o] * x[first + o]
    return out


def unpool(d, x, ids, block, stride, weights=None) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of x and of the weights from that of the pooled blocks."""
    weights = np.full(block, 1 / block) if weights is None else weights
    dx, dw = np.zeros_like(x), np.zeros(block)
    for i, (first, _) in enumerate(pooled_blocks(ids, block, stride)):
        for o in range(block):
            dx[first + o] += weights[o] * d[i]
            dw[o] += (x[first + o] * d[i]).sum()
    return dx, dw


def attention(q, k, v, seen, scale):
    """(out [T, N, Hv], logsumexp [T, N], p [T, N, S])."""
    T, N, _ = q.shape
    group = N // k.shape[1]
    out, lse = np.zeros((T, N, v.shape[2])), np.full((T, N), -np.inf)
    p = np.zeros((T, N, k.shape[0]))
    for t in range(T):
        for n in range(N):
            at = np.flatnonzero(seen[t, n // group])
            if at.size == 0:
                continue
            s = scale * k[at, n // group] @ q[t, n]
            lse[t, n] = s.max() + np.log(np.exp(s - s.max()).sum())
            p[t, n, at] = np.exp(s - lse[t, n])
            out[t, n] = p[t, n, at] @ v[at, n // group]
    return out, lse, p


def attention_grads(q, k, v, seen, scale, d_out, d_lse=None):
    """(dq, dk, dv) of Σ out · d_out + Σ lse · d_lse."""
    out, lse, p = attention(q, k, v, seen, scale)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    T, N, _ = q.shape
    group = N // k.shape[1]
    for t in range(T):
        for n in range(N):
            kappa = n // group
            if not np.isfinite(lse[t, n]):
                continue
            dp = v[:, kappa] @ d_out[t, n]
            ds = p[t, n] * (dp - out[t, n] @ d_out[t, n])
            if d_lse is not None:
                ds = ds + p[t, n] * d_lse[t, n]
            dq[t, n] += scale * ds @ k[:, kappa]
            dk[:, kappa] += scale * np.outer(ds, q[t, n])
            dv[:, kappa] += np.outer(p[t, n], d_out[t, n])
    return dq, dk, dv


def best(scores, current, n, initial, local) -> tuple[list[int], float]:
    """The n best of blocks 0 … current, forced ones first; and by how much the choice was clear."""
    blocks = list(range(current + 1))
    forced = [j for j in blocks if j < initial or j > current - local]
    free = sorted((j for j in blocks if j not in forced), key=lambda j: (-scores[j], j))
    taken = max(0, n - len(forced))
    gap = np.inf
    if 0 < taken < len(free):
        gap = scores[free[taken - 1]] - scores[free[taken]]
    return sorted(forced + free[:taken]), gap


def choose(score, ids, K, block, n, initial, local) -> tuple[np.ndarray, float]:
    """Indices [T, K, n] from score(t, κ, j); -1 where there are fewer. And the smallest gap."""
    T = len(ids)
    indices, smallest = np.full((T, K, n), -1), np.inf
    for t, begin in enumerate(starts(ids)):
        if begin < 0:
            continue
        current = (t - begin) // block
        for kappa in range(K):
            scores = [score(t, kappa, j) for j in range(current + 1)]
            chosen, gap = best(scores, current, n, initial, local)
            indices[t, kappa, : len(chosen)] = chosen
            smallest = min(smallest, gap)
    return indices, smallest


def nsa_score(p, ids, block, pooled_block, stride, group):
    """The paper's importance: weights p [T, N, P] on pooled blocks, by the tokens shared."""
    blocks, begins = pooled_blocks(ids, pooled_block, stride), starts(ids)

    def score(t, kappa, j):
        total = 0.0
        for i, (first, number) in enumerate(blocks):
            if begins[first] != begins[t]:
                continue
            lo = max(number * stride, j * block)
            hi = min(number * stride + pooled_block, (j + 1) * block)
            weight = p[t, kappa * group : (kappa + 1) * group, i].sum()
            total += max(0, hi - lo) / stride * weight
        return total

    return score


def moba_score(q, k, ids, block):
    begins, group = starts(ids), q.shape[1] // k.shape[1]

    def score(t, kappa, j):
        lo = begins[t] + j * block
        mean = k[lo : lo + block, kappa].mean(0)
        return sum(q[t, n] @ mean for n in range(kappa * group, (kappa + 1) * group))

    return score


def msa_score(index_q, index_k, ids, block):
    begins = starts(ids)

    def score(t, kappa, j):
        lo = begins[t] + j * block
        keys = index_k[lo : min(lo + block, t + 1), min(kappa, index_k.shape[1] - 1)]
        return (keys @ index_q[t, kappa]).max()

    return score
