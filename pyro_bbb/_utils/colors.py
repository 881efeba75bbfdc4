# SPDX-License-Identifier: Apache-2.0
"""The colours of all pictures: Okabe-Ito, told apart with any common colour blindness.

M. Okabe and K. Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/, 2008.
"""

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILLION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY)  # neighbours differ in lightness too
