# SPDX-License-Identifier: Apache-2.0
"""The templates of the pages, ``report.html`` and ``play.html``; values are escaped."""

from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pyro_bbb._utils.colors import SKY, VERMILLION


@cache
def template(name: str) -> Template:
    """Return a template, whose ``module`` has its macros."""
    jinja = Environment(
        loader=PackageLoader("pyro_bbb.apps", "."), autoescape=True, undefined=StrictUndefined
    )
    jinja.globals["colors"] = {"sky": SKY, "vermillion": VERMILLION}
    return jinja.get_template(name)
