// Package admin is what an operator sees of a gateway: the admin port, and the
// access log with a writer that never holds up a tunnel.
//
//	out := admin.NewAsyncWriter(os.Stderr)
//	log := slog.New(admin.NewHandler(out, false, slog.LevelInfo))
//	access := &admin.AccessLog{Log: log}
//	router.Observe = access.Observe
//
//	if err := admin.CheckAddr(addr, false); err != nil {
//		return err
//	}
//	ln, err := admin.Listen(ctx, addr)
//	if err != nil {
//		return err
//	}
//	guard.OwnAdmin(ln.Addr()) // or a client could reach it through the gateway
//	a := &admin.Admin{Ready: ready, Metrics: m.Handler(), Pprof: true, Log: log}
//	return a.Serve(ctx, ln)
//
// The admin port has no passwords: it is for loopback, for a unix socket, whose
// file's owner alone may ask, or for a network that is trusted as a whole. By
// TCP it only ever answers; by the socket tunnels can be closed, too.
//
// What a client sent is escaped before it reaches a log line, a terminal or an
// answer: no line breaks, no terminal controls, no bidirectional overrides.
package admin
