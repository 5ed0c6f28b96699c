// Package watch keeps caches of Kubernetes objects up to date, and knows how far they can be
// trusted. Everything here that reads many objects of the API server reads them by this package.
//
//	services := watch.NewCache(func(before, after metav1.Object) { changed.Notify() })
//	w := watch.New(watch.Config{
//		Name: "shop", Resource: corev1.Resource("services"), Object: &corev1.Service{},
//		Source: watch.Source(core.CoreV1().Services(""), nil), Client: core,
//		Store: services, OnChange: func(before, after watch.State) { changed.Notify() }, Log: log,
//	})
//	go w.Run(ctx)
//	for range changed {
//		switch s := w.State(); {
//		case !s.Known(): // not listed yet
//		case s.Err != nil || s.Unconfirmed != nil: // keep what was made of the cache before
//		default:
//			use(services.All())
//		}
//	}
//
// # What a Watch knows
//
// client-go's reflectors and informers retry for as long as it takes, and report nothing. A Watch
// observes each answer on the way:
//
//   - A missing permission is believed once three answers in a row have said so, because an API
//     server that has just started knows no roles for a moment. It is logged once, and State.Denied
//     says it. The request is repeated, in case the permission is granted.
//   - A missing resource type, because its CustomResourceDefinition is not installed, is
//     State.Missing. It is asked for again after growing pauses, and at once when Definitions
//     report that it was installed.
//   - Other failures are State.Err until a request succeeds. While the Pulse says that the API
//     server does not answer, requests are repeated every second or two, and not after the pauses
//     of up to a minute that client-go makes.
//   - An API server that has lost its store, or is restoring it, returns empty lists for a moment.
//     When all objects of a Watch vanish they stay in its Store until a second list, which bypasses
//     the API server's cache, confirms that there are none. State.Unconfirmed says so meanwhile.
//
// # Notification
//
// Stores are called for each change, in order. A Signal collapses any number of changes into one
// notification, for translators that make everything anew and Sleep in between.
//
// Reachability reports when the API server stops answering, and Events writes Events of which no
// two say the same.
package watch
