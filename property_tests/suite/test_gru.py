import torch
from dspark_cases import normal

from numden.models import gru
from numden.pure import random


def test_equivalent_scan_torch():
    params = gru.init(random.key(0), input_size=4, state_size=3, std=0.8, dtype=torch.float64)
    inputs = normal(1, 2, 5, 6, 4)
    oracle = torch.nn.GRU(4, 3, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        oracle.weight_ih_l0.copy_(params["input"])
        oracle.weight_hh_l0.copy_(params["state"])
        expected = oracle(inputs.flatten(0, 1))[0].unflatten(0, (2, 5))
    torch.testing.assert_close(gru.scan(params, inputs), expected)


def test_equivalent_scan_steps():
    params = gru.init(random.key(0), input_size=4, state_size=3, std=0.8)
    inputs = normal(1, 2, 6, 4).float()
    state = gru.initial_state(params, inputs[:, 0])
    for i, states in enumerate(gru.scan(params, inputs).unbind(1)):
        state = gru.step(params, state, inputs[:, i])
        torch.testing.assert_close(state, states)
