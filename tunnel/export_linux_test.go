//go:build amd64 || arm64

package tunnel

import "time"

// UnderWay names what a socket has to send.
func UnderWay(fd int32) string {
	w, _, _ := underWay(fd)
	return map[way]string{nothing: "nothing", waiting: "waiting", unanswered: "unanswered"}[w]
}

// Judges returns what one look after the other at a socket says of its peer: of
// each, what is under way, for how long nothing was acknowledged, and how many
// probes went unanswered.
func Judges(looks ...Look) (dead []bool) {
	var a asked
	for _, l := range looks {
		w := map[string]way{"nothing": nothing, "waiting": waiting, "unanswered": unanswered}[l.Under]
		dead = append(dead, a.judge(w, l.Quiet, l.Probes))
	}
	return dead
}

// A Look is what is seen of a socket.
type Look struct {
	Under  string
	Quiet  time.Duration
	Probes int
}
