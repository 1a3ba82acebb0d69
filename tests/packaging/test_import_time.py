"""What `import credit_trl` loads."""

import subprocess
import sys


def test_importing_package_loads_neither_trl_nor_torch():
    heavy = ("torch", "trl", "transformers", "datasets", "matplotlib", "scipy")
    code = f"import sys, credit_trl; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert ran.stdout.strip() == "[]"
