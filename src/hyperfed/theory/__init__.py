"""What the papers prove, as calculators: bounds whose unknown constants are arguments.

====================================== ===========================================================
PeFLL, theorem 3.1                     :func:`pefll.gradient_norm_bound`
PeFLL, theorem 4.1                     :func:`pefll.generalization_bound`
PeFLL, theorem 4.2                     the same, with :func:`pefll.gaussian_kl`; of a trained run
                                       :func:`hyperfed.papers.bound.measure`
pFedHN, proposition 1                  :func:`pfedhn.linear_hypernetwork`, and as denoising
                                       :func:`pfedhn.expected_error`
pFedHN, theorem 1                      :func:`pfedhn.samples_needed`, with the Lipschitz constants
                                       of a hypernetwork
pFedKT, theorem 5.1                    :func:`pfedkt.samples_needed`
pFedKT, theorem 5.2                    :func:`pfedkt.loss_bound`
IT-PFL, theorem 5.1                    :func:`itpfl.novel_error_bound`
IT-PFL, lemma 7.1                      :func:`itpfl.sensitivity`
====================================== ===========================================================

Where a statement in print does not follow from its proof, the function computes what does, says so
in its docstring, and gives the printed number for ``published=True``.
"""
