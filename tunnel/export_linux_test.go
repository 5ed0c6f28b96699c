//go:build amd64 || arm64

package tunnel

// UnderWay names what a socket has to send.
func UnderWay(fd int32) string {
	w, _, _ := underWay(fd)
	return map[way]string{nothing: "nothing", waiting: "waiting", unanswered: "unanswered"}[w]
}
