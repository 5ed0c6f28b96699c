package localuser

import (
	"testing"

	"culvert.dev/tunnel"
)

func TestProcessesOfOtherUsersAreRefused(t *testing.T) {
	check := &Check{UIDs: []uint32{1000}}
	for _, c := range []struct {
		p    *tunnel.Process
		want tunnel.Reason
	}{
		{&tunnel.Process{UID: 1000}, ""},
		{&tunnel.Process{UID: 0, GID: 1000}, ""}, // root can do what others can
		{&tunnel.Process{UID: 1001, GID: 1000}, tunnel.Denied},
		{nil, tunnel.Denied}, // not known
	} {
		err := check.AdmitProcess(c.p)
		if got := tunnel.ReasonOf(err); (err != nil) != (c.want != "") || err != nil && got != c.want {
			t.Errorf("%+v: got %v, want %q", c.p, err, c.want)
		}
	}
}
