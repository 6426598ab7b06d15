"""The five similarities from their definitions in float64, with d×d matrices and explicit SVDs.

Slow on purpose: they are the oracle for the fast implementations.
"""

from __future__ import annotations

import numpy as np
import scipy.linalg


def pk(a: np.ndarray, b: np.ndarray) -> float:
    angles = scipy.linalg.subspace_angles(a.astype(np.float64), b.astype(np.float64))
    return float(np.sum(np.cos(angles) ** 2))


def frobenius_ratio(x: np.ndarray, y: np.ndarray) -> float:
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    return float(np.linalg.norm(x @ y) / norms) if norms > 0 else 0.0


def circuit_matrix(head: dict[str, np.ndarray], role: str) -> np.ndarray:
    """The d×d matrix that CS takes for a role of the source head: W_QK, W_QKᵀ, W_OVᵀ, W_OV.

    ``head`` has the four d×m weights W_Qᵀ, W_Kᵀ, W_Vᵀ, W_O, so W_QK = W_QᵀW_K is Q·Kᵀ and W_OV = W_O W_V is O·Vᵀ.
    """
    qk, ov = head["Q"] @ head["K"].T, head["O"] @ head["V"].T
    return {"Q": qk, "K": qk.T, "V": ov.T, "O": ov}[role]


def cs(source: dict[str, np.ndarray], target: dict[str, np.ndarray], pairing: str) -> float:
    return frobenius_ratio(circuit_matrix(target, pairing[1]).T, circuit_matrix(source, pairing[0]))


def simple_cs(a: np.ndarray, b: np.ndarray) -> float:
    return frobenius_ratio(b.T.astype(np.float64), a.astype(np.float64))


def linear_cka(a: np.ndarray, b: np.ndarray) -> float:
    a, b = (w - w.mean(axis=1, keepdims=True) for w in (a.astype(np.float64), b.astype(np.float64)))
    norms = np.linalg.norm(a @ a.T) * np.linalg.norm(b @ b.T)
    return float(np.linalg.norm(a @ b.T) ** 2 / norms) if norms > 0 else 0.0


def procrustes(a: np.ndarray, b: np.ndarray) -> float:
    a, b = a.astype(np.float64), b.astype(np.float64)
    nuclear = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    total = np.linalg.norm(a) ** 2 + np.linalg.norm(b) ** 2
    return float(2 * nuclear / total) if total > 0 else 0.0


def similarity(metric: str, source: dict[str, np.ndarray], target: dict[str, np.ndarray], pairing: str) -> float:
    """Any of the five, of two heads given as dicts of their d×m weights."""
    if metric == "cs":
        return cs(source, target, pairing)
    return globals()[metric](source[pairing[0]], target[pairing[1]])
