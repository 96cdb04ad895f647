use strict;
my $right = 1;
for my $name ("Ada", "Grace") {
    my $said = qx(perl greet.pl $name 2>/dev/null);
    $right = 0 unless $said eq "Hello, $name!\n";
}
open(my $file, ">", "/logs/verifier/reward.txt") or die;
print $file "$right\n";
