"""The package's face: a dozen names, each loaded when it is first asked for."""

import subprocess
import sys
from importlib.metadata import version

import pytest

import howdah


@pytest.mark.parametrize("name", howdah.__all__)
def test_every_name_is_there(name):
    assert getattr(howdah, name).__module__.startswith("howdah.")
    assert name in dir(howdah)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = howdah.trian


def test_names_of_the_light_floors_load_no_torch():
    script = "import sys, howdah; howdah.preset('laptop'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_version_is_the_installed_one():
    assert howdah.__version__ == version("howdah")
