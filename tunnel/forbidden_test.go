package tunnel

import (
	"net/netip"
	"strings"
	"testing"
)

// Every spelling of a place that must not be reached: as an address it is
// forbidden, and where it is no address it is no name either.
var forbiddenSpellings = []struct{ in, why string }{
	// This host.
	{"0.0.0.0", "this host"}, {"0.0.0.1", "this host"}, {"0.255.255.255", "this host"},
	{"127.0.0.1", "loopback"}, {"127.0.0.2", "loopback"}, {"127.1.2.3", "loopback"}, {"127.255.255.255", "loopback"},
	{"::1", "loopback"}, {"0:0:0:0:0:0:0:1", "loopback"}, {"0000:0000:0000:0000:0000:0000:0000:0001", "loopback"},
	{"::", "unspecified"}, {"0:0:0:0:0:0:0:0", "unspecified"},
	// The link and the cloud's metadata.
	{"169.254.0.1", "link-local"}, {"169.254.169.254", "link-local"}, {"169.254.170.2", "link-local"}, {"169.254.255.255", "link-local"},
	{"100.100.100.200", "metadata"}, {"168.63.129.16", "metadata"}, {"192.0.0.192", "metadata"},
	{"fd00:ec2::254", "metadata"}, {"fd00:0ec2:0:0:0:0:0:254", "metadata"}, {"fd00:ec2::23", "metadata"}, {"fd20:ce::254", "metadata"},
	{"fe80::1", "link-local"}, {"fe80::1%eth0", "link-local"}, {"febf:ffff::1", "link-local"}, {"fec0::1", "site-local"}, {"feff::1", "site-local"},
	// Many at once.
	{"224.0.0.1", "multicast"}, {"239.255.255.255", "multicast"}, {"255.255.255.255", "broadcast"},
	{"ff02::1", "multicast"}, {"ff02::1%lo", "multicast"}, {"ff0e::1", "multicast"},
	// IPv4 in IPv6 clothes.
	{"::ffff:127.0.0.1", "loopback"}, {"::ffff:7f00:1", "loopback"}, {"0:0:0:0:0:ffff:7f00:0001", "loopback"}, {"::ffff:127.0.0.1%lo", "loopback"},
	{"::ffff:0.0.0.0", "this host"}, {"::ffff:169.254.169.254", "link-local"}, {"::ffff:a9fe:a9fe", "link-local"},
	{"::127.0.0.1", "loopback"}, {"::7f00:1", "loopback"}, {"::169.254.169.254", "link-local"}, {"::2", "this host"},
	{"::ffff:0:127.0.0.1", "loopback"},
	{"2002:7f00:1::", "loopback"}, {"2002:7f00:0001::1", "loopback"}, {"2002:a9fe:a9fe::1", "link-local"}, {"2002::1", "this host"},
	{"64:ff9b::127.0.0.1", "loopback"}, {"64:ff9b::7f00:1", "loopback"}, {"64:ff9b::169.254.169.254", "link-local"}, {"64:ff9b::", "this host"},
	{"64:ff9b:1::127.0.0.1", "loopback"}, {"64:ff9b:1:7f00:0:100::", "loopback"}, {"64:ff9b:1:7f:0:1::", "loopback"},
	{"64:ff9b:1:0:7f:0:100:0", "loopback"}, {"64:ff9b:1:a9fe:a9:fe00::", "link-local"}, {"64:ff9b:1::1", "this host"}, {"64:ff9b:1::", "this host"},
	{"64:ff9b:1:7f00:0:100:808:808", "loopback"}, // a /48 with a suffix chosen to look like 8.8.8.8
	{"2001:0:808:808:0:0:80ff:fffe", "loopback"}, // Teredo client 127.0.0.1
	{"2001:0:7f00:1:0:0:f7f7:f7f7", "loopback"},  // Teredo server 127.0.0.1
	// Spellings only lenient parsers read.
	{"2130706433", ""}, {"0x7f000001", ""}, {"0x7F.1", ""}, {"017700000001", ""}, {"127.1", ""}, {"127.0.1", ""}, {"0", ""},
	{"0177.0.0.1", ""}, {"127.0.0.01", ""}, {"127.0.0.1.", ""}, {"0x7f.0x0.0x0.0x1", ""}, {"[::1]", ""}, {"①②⑦.0.0.1", ""}, {"127。0。0。1", ""},
	{"::1%25lo", "loopback"}, {"::ffff:0x7f.1", ""}, {"127.0.0.1\x00", ""}, {" 127.0.0.1", ""},
}

func TestForbidden(t *testing.T) {
	if n := len(forbiddenSpellings); n < 60 {
		t.Errorf("%d spellings, want at least 60", n)
	}
	for _, tt := range forbiddenSpellings {
		a, err := netip.ParseAddr(tt.in)
		if err != nil {
			if n, err := ParseName(tt.in); err == nil {
				t.Errorf("%q is not an address and became the name %q", tt.in, n)
			}
			if tt.why != "" {
				t.Errorf("ParseAddr(%q): %v", tt.in, err)
			}
			continue
		}
		why, bad := Forbidden(a)
		if !bad || tt.why == "" || !strings.Contains(why, tt.why) {
			t.Errorf("Forbidden(%s) = %q, %v, want %q", tt.in, why, bad, tt.why)
		}
	}
	if why, bad := Forbidden(netip.Addr{}); !bad {
		t.Errorf("Forbidden(zero) = %q, %v, want true", why, bad)
	}
}

func TestForbiddenAllows(t *testing.T) {
	for _, s := range []string{
		"1.0.0.0", "8.8.8.8", "126.255.255.255", "128.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "100.100.100.201",
		"169.253.255.255", "169.255.0.0", "192.0.2.1", "192.0.0.191", "223.255.255.255", "240.0.0.1",
		"::ffff:10.0.0.1", "::ffff:8.8.8.8", "2002:a00:1::1", "2002:808:808::", "64:ff9b::8.8.8.8", "64:ff9b::a00:1",
		"64:ff9b:1::8.8.8.8", "64:ff9b:1:808:8:800::", "64:ff9b:1:8:8:808::", "64:ff9b:1::10.0.0.1",
		"2001:0:808:808:0:0:f7f7:f7f7", "2001:db8::1", "2001:1::1", "2606:4700::1111", "fd00::1", "fd00:ec2::253", "fc00::1", "fe00::1", "64:ff9b:2::7f00:1",
	} {
		if why, bad := Forbidden(netip.MustParseAddr(s)); bad {
			t.Errorf("Forbidden(%s) = %q, want allowed", s, why)
		}
	}
}

// The verdict on an IPv4 address is the verdict on each of its disguises.
func TestForbiddenDisguises(t *testing.T) {
	for _, s := range []string{"127.0.0.1", "169.254.169.254", "8.8.8.8", "10.1.2.3", "224.0.0.5", "255.255.255.255", "100.100.100.200"} {
		v4 := netip.MustParseAddr(s)
		b := v4.As4()
		_, want := Forbidden(v4)
		disguises := map[string][16]byte{
			"mapped":     {10: 0xff, 11: 0xff, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"compatible": {12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"translated": {8: 0xff, 9: 0xff, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"6to4":       {0: 0x20, 1: 0x02, 2: b[0], 3: b[1], 4: b[2], 5: b[3], 15: 1},
			"teredo":     {0: 0x20, 1: 0x01, 4: 8, 5: 8, 6: 8, 7: 8, 12: ^b[0], 13: ^b[1], 14: ^b[2], 15: ^b[3]},
			"nat64":      {1: 0x64, 2: 0xff, 3: 0x9b, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"local/96":   {1: 0x64, 2: 0xff, 3: 0x9b, 5: 1, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"local/48":   {1: 0x64, 2: 0xff, 3: 0x9b, 5: 1, 6: b[0], 7: b[1], 9: b[2], 10: b[3]},
		}
		for name, d := range disguises {
			if why, got := Forbidden(netip.AddrFrom16(d)); got != want {
				t.Errorf("%s form of %s: forbidden %v (%q), want %v", name, s, got, why, want)
			}
		}
	}
}
