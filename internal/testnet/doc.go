// Package testnet is the test kit for everything that carries bytes. It is
// imported by tests only.
//
// A package's TestMain is
//
//	func TestMain(m *testing.M) { testnet.Main(m) }
//
// which fails the run if a goroutine or a descriptor is left over.
//
// The chaos pair drives both ends of a carrier at once, with chunks from one
// byte to a mebibyte, stalls, and an end or an abort at a random place, and
// checks every byte. It works over anything that gives two ends of a stream;
// a Backend makes such pairs through a proxy:
//
//	b := testnet.NewBackend(t)
//	gw := startGateway(t, b.Addr())
//	dial := b.Through(func(ctx context.Context) (net.Conn, error) {
//		return d.DialContext(ctx, "tcp", gw)
//	}, hello)
//	for seed := range uint64(50) {
//		testnet.Run(ctx, t, dial, testnet.Random(seed, 8<<20))
//	}
//
// TestEndings runs the six half-close and abort scenarios over the same dial
// function: an end of stream must arrive as one, and an abort as an abort.
//
// The servers (Echo, Discard, Greeting, ServeTLS, Tap, or Serve and Service for
// one's own) stand behind what is tested, and a Recorder in the middle of a
// path keeps its bytes. All listen on loopback and end with their test. Listen,
// Connect and Ping are a client's. The package netns below makes network
// namespaces.
//
// Nothing here sleeps to give others time: Eventually polls with a deadline,
// and the chaos pair's stalls change the timing and never the outcome.
package testnet
