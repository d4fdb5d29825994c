"""What steps had of each term and how long they took -> seconds of each term."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def fit_terms(features: Floats, seconds: Floats) -> Floats:
    """Terms of 0 or more that predict ``seconds`` with the least squared relative error.

    A term that comes out negative is noise: it is left out and the rest is fitted again.
    """
    scaled = features / seconds[:, None]
    used = list(range(features.shape[1]))
    terms = np.zeros(features.shape[1])
    while used:
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(seconds)), rcond=None)
        if found.min() >= 0:
            terms[used] = found
            break
        used.pop(int((found * scaled[:, used].mean(axis=0)).argmin()))
    return terms
