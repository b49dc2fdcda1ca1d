// "Quotes", back\slashes, ${variables}, @AT@, ; semicolons, [brackets] and )" survive embedding.
