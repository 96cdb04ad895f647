#!/bin/sh
sed -i 's/http:/https:/g' page.html