#!/bin/sh
cat > greet.pl <<'END'
print "Hello, $ARGV[0]!\n";
END
