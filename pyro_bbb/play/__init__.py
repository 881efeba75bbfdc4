"""What is behind ``pyro-bbb play``: a page to draw digits on, and to place points of a regression.

`drawing` turns strokes into the network's input, `hands` draws what the training digits lack,
`digits` trains, keeps and asks the classifier, `curve` is the regression, `pictures` draws both,
and `page` is the page; it alone needs NiceGUI.
"""
