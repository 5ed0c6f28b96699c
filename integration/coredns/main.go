// Command coredns is CoreDNS with the plugins that the tests use. It is a
// module of its own: what CoreDNS needs is no concern of what is tested.
package main

import (
	"github.com/coredns/coredns/coremain"

	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/forward"
	_ "github.com/coredns/coredns/plugin/hosts"
	_ "github.com/coredns/coredns/plugin/rewrite"
)

func main() { coremain.Run() }
